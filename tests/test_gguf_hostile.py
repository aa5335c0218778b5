"""Malformed GGUF files: each ends in FileError, at once, and says where."""

import itertools
import os
import re
import struct
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrum_triton.errors import FileError
from ferrum_triton.files import gguf as reader
from ferrum_triton.files.ggml_types import GGML_TYPES
from ferrum_triton.files.gguf import open_gguf
from tests import gguf_writer as w

F32, Q4_0, I8 = 0, 2, 24


def pairs_only(*pairs):
    return w.gguf(pairs)


def one(name="t", dims=(4,), kind=I8, offset=0, data=b"\1" * 64, **rest):
    return w.gguf((), [w.tensor(name, dims, kind, offset)], data, **rest)


def two(first, second, data=b"\1" * 128):
    return w.gguf((), [w.tensor("a", *first), w.tensor("b", *second)], data)


def value(kind, body):
    return w.gguf([w.string("k") + w.u32(kind) + body])


def array_of(kind, count, body=b""):
    return value(w.ARRAY, w.u32(kind) + w.u64(count) + body)


def alignment(kind, number):
    return pairs_only(w.pair("general.alignment", kind, number))


HUGE = 2**60
# What is wrong, the file, and words of the reason.
MALFORMED = {
    "empty": (b"", "empty"),
    "one byte": (b"G", "4 bytes"),
    "wrong magic": (b"GGML" + w.gguf()[4:], "GGUF"),
    "reversed magic": (b"FUGG" + w.gguf()[4:], "GGUF"),
    "version 0": (w.gguf(version=0), "version 0"),
    "version 1": (w.gguf(version=1), "version 1"),
    "version 4": (w.gguf(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "more tensors than fit": (w.gguf(counts=(HUGE, 0)), "tensors do not fit"),
    "most tensors": (w.gguf(counts=(2**64 - 1, 0)), "tensors do not fit"),
    "one tensor too many": (one(counts=(2, 0)), "tensor|do not fit"),
    "more pairs than fit": (w.gguf(counts=(0, HUGE)), "pairs do not fit"),
    "one pair too many": (w.gguf([w.pair("k", w.U8, 1)], counts=(0, 2)), "pairs do not fit|key"),
    "empty key": (pairs_only(w.pair("", w.U32, 1)), "key has 0 bytes"),
    "key of 65536 bytes": (pairs_only(w.pair("k" * 65536, w.U32, 1)), "key has 65536 bytes"),
    "key longer than the file": (
        w.gguf([w.u64(60000) + b"k" * 40]),
        "metadata key needs 60000 bytes",
    ),
    "key of 2^64 - 1 bytes": (w.gguf([w.u64(2**64 - 1) + b"k" * 40]), "key has"),
    "key not UTF-8": (pairs_only(w.pair(b"a\xff", w.U32, 1)), "not UTF-8"),
    "key twice": (pairs_only(w.pair("k", w.U8, 1), w.pair("k", w.U16, 2)), "'k' appears twice"),
    "unknown value type": (value(13, b"\0" * 16), "unknown type 13"),
    "largest value type": (value(2**32 - 1, b"\0" * 16), "unknown type"),
    "bool 2": (value(w.BOOL, b"\2"), "boolean"),
    "bool 255 in an array": (array_of(w.BOOL, 3, b"\0\1\xff"), "boolean"),
    "string longer than the file": (value(w.STRING, w.u64(HUGE) + b"x"), "left in the file"),
    "string not UTF-8": (value(w.STRING, w.string(b"ab\xc3\x28")), "not UTF-8"),
    "surrogate in a string": (value(w.STRING, w.string(b"\xed\xa0\x80")), "not UTF-8"),
    "u8 array of 2^60": (array_of(w.U8, HUGE, b"\0" * 64), "do not fit"),
    "u64 array of 2^61": (array_of(w.U64, 2**61, b"\0" * 64), "do not fit"),
    "string array of 2^60": (array_of(w.STRING, HUGE, b"\0" * 64), "do not fit"),
    "string array, last element cut": (
        array_of(w.STRING, 2, w.string("a") + w.u64(60) + b"b"),
        "element of .* left in the file",
    ),
    "string array, last byte cut": (
        w.gguf([w.array("k", w.STRING, ["a", "bc"])[:-1]], alignment=1),
        "element of .* left in the file",
    ),
    "string array not UTF-8": (
        array_of(w.STRING, 2, w.string("a") + w.string(b"\x80")),
        "element of .* not UTF-8",
    ),
    "array of arrays": (array_of(w.ARRAY, 1, w.u32(w.U8) + w.u64(0)), "array of arrays"),
    "deeply nested arrays": (array_of(w.ARRAY, 1, (w.u32(w.ARRAY) + w.u64(1)) * 9999), "arrays"),
    "array of an unknown type": (array_of(77, 1, b"\0" * 16), "unknown type 77"),
    "alignment 0": (alignment(w.U32, 0), "alignment"),
    "alignment 1": (alignment(w.U32, 1), "alignment"),
    "alignment 24": (alignment(w.U32, 24), "alignment"),
    "alignment 2^31": (alignment(w.U32, 2**31), "alignment"),
    "alignment -32": (alignment(w.I32, -32), "alignment"),
    "alignment 32.0": (alignment(w.F32, 32.0), "alignment"),
    "alignment true": (alignment(w.BOOL, True), "alignment"),
    "alignment '32'": (alignment(w.STRING, "32"), "alignment"),
    "split in two": (pairs_only(w.pair("split.count", w.U16, 2)), "split"),
    "split in 'x'": (pairs_only(w.pair("split.count", w.STRING, "x")), "split"),
    "empty name": (one(name=""), "name has 0 bytes"),
    "name of 256 bytes": (one(name="n" * 256), "name has 256 bytes"),
    "name not UTF-8": (one(name=b"\xfe"), "not UTF-8"),
    "name twice": (
        w.gguf((), [w.tensor("t", (4,), I8, 0), w.tensor("t", (4,), I8, 32)], b"\1" * 64),
        "'t' appears twice",
    ),
    "no dimensions": (one(dims=()), "0 dimensions"),
    "5 dimensions": (one(dims=(1, 1, 1, 1, 1)), "5 dimensions"),
    "2^32 - 1 dimensions": (
        w.gguf((), [w.string("t") + w.u32(2**32 - 1) + b"\1" * 64]),
        "dimensions",
    ),
    "dimension 0": (one(dims=(4, 0)), "dimensions"),
    "row of 0": (one(dims=(0,)), "dimensions"),
    "dimension 2^31": (one(dims=(2**31,)), "dimensions"),
    "product 2^64": (one(dims=(2**16,) * 4), "past the file's end"),
    "product wraps to 4": (one(dims=(2**31 - 1, 2**31 - 1, 4, 1)), "past the file's end"),
    "dimension 2^64 - 1": (one(dims=(2**64 - 1, 2)), "dimensions"),
    "unknown type": (one(kind=42), "unknown type 42"),
    "removed type Q4_2": (one(kind=4), "unknown type 4"),
    "largest type": (one(kind=2**32 - 1), "unknown type"),
    "row of half a block": (one(dims=(16, 2), kind=Q4_0), "multiple of Q4_0's 32"),
    "offset off the alignment": (one(offset=8), "multiple of 32"),
    "offset past the end": (one(offset=2**40), "past the file's end"),
    "largest offset": (one(offset=2**64 - 32), "past the file's end"),
    "one byte too long": (one(dims=(65,)), "past the file's end"),
    "data missing": (one(data=b""), "past the file's end"),
    "same data twice": (two(((32,), I8, 0), ((32,), I8, 0)), "overlap"),
    "overlap by one byte": (two(((33,), I8, 0), ((4,), I8, 32)), "overlap"),
    "overlap in reverse": (two(((4,), I8, 32), ((33,), I8, 0)), "overlap"),
    "one inside the other": (two(((128,), I8, 0), ((4,), I8, 64)), "overlap"),
}


def refused(path, contents):
    """The error that opening ``contents`` ends in, within a second of the processor."""
    path.write_bytes(contents)
    start = time.process_time()
    with pytest.raises(FileError) as caught:
        open_gguf(path)
    assert time.process_time() - start < 1.0
    assert caught.value.path == str(path)
    if caught.value.offset is not None:
        assert 0 <= caught.value.offset <= len(contents)
    return caught.value


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(tmp_path, what):
    contents, reason = MALFORMED[what]
    error = refused(tmp_path / "model.gguf", contents)
    assert re.search(reason, error.reason), error.reason


def test_the_same_files_unharmed_are_accepted(tmp_path):
    """The builders themselves make valid files, so a refusal is for the harm done."""
    path = tmp_path / "model.gguf"
    valid = [
        w.gguf(),
        one(),
        one(dims=(64,)),
        one(name="n" * 255),
        one(dims=(32, 2), kind=Q4_0),
        one(dims=(1, 1, 1, 1)),
        two(((32,), I8, 0), ((32,), I8, 32)),
        two(((32,), I8, 64), ((64,), I8, 0)),
        value(w.BOOL, b"\1"),
        array_of(w.STRING, 2, w.string("a") * 2),
        array_of(w.U8, 64, b"\0" * 64),
        alignment(w.U32, 8),
        pairs_only(w.pair("split.count", w.U16, 1)),
        pairs_only(w.pair("k" * 65535, w.U32, 1)),
    ]
    for contents in valid:
        path.write_bytes(contents)
        with open_gguf(path):
            pass


def sample():
    """A small valid file with every kind of value."""
    pairs = [w.pair(f"k{kind}", kind, 1) for kind in w._PACK]
    pairs += [w.pair("general.architecture", w.STRING, "llama"), w.array("i", w.I32, [1, -2, 3])]
    pairs += [w.array("s", w.STRING, ["a", "", "é"]), w.array("b", w.BOOL, [True, False])]
    tensors = [w.tensor("f", (3, 2), F32, 0), w.tensor("q", (32, 2), Q4_0, 32)]
    return w.gguf(pairs, tensors, bytes(range(68)))


SAMPLE = sample()


def test_truncated_anywhere(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SAMPLE)
    with open_gguf(path) as file:
        assert file.tensors["q"].offset + file.tensors["q"].nbytes == len(SAMPLE)
    for length in range(len(SAMPLE)):
        refused(path, SAMPLE[:length])


def read_wholly(path):
    """Check that everything an opened file promises is there."""
    size = path.stat().st_size
    with open_gguf(path) as file:
        spans = []
        for tensor in file.tensors.values():
            data = tensor.data()
            assert data.numel() * data.element_size() == tensor.nbytes
            assert 0 < tensor.offset <= tensor.offset + tensor.nbytes <= size
            assert tensor.type is GGML_TYPES[tensor.type.id]
            data.clone()
            spans.append((tensor.offset, tensor.offset + tensor.nbytes))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        repr(dict(file.metadata))


flips = st.lists(
    st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4
)
words = st.lists(
    st.tuples(
        st.integers(0, len(SAMPLE) - 8),
        st.sampled_from([0, 1, 2, 9, 31, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]),
    ),
    max_size=2,
)


@settings(max_examples=300)
@given(flips, words)
@example([(4, 2)], [])
def test_mutated_files_are_refused_or_whole(tmp_path_factory, flips, words):
    mutated = bytearray(SAMPLE)
    for position, byte in flips:
        mutated[position] = byte
    for position, word in words:
        mutated[position : position + 8] = w.u64(word)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(mutated)
    start = time.process_time()
    try:
        read_wholly(path)
    except FileError as error:
        assert error.path == str(path)
    finally:
        path.unlink()
    assert time.process_time() - start < 1.0


@given(st.binary(max_size=200))
def test_random_bytes_after_the_magic(tmp_path_factory, tail):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(b"GGUF" + w.u32(3) + tail)
    try:
        read_wholly(path)
    except FileError:
        pass
    finally:
        path.unlink()


def test_header_limit(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(SAMPLE)
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 100)
    with pytest.raises(FileError, match="header is longer than 100 bytes"):
        open_gguf(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")


def test_directory(tmp_path):
    with pytest.raises(FileError, match="not a regular file"):
        open_gguf(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_named_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="not a regular file"):
        open_gguf(tmp_path / "pipe")
