"""Writes GGUF files byte by byte, wrong ones included."""

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_PACK = {
    U8: "<B",
    I8: "<b",
    U16: "<H",
    I16: "<h",
    U32: "<I",
    I32: "<i",
    F32: "<f",
    BOOL: "<?",
    U64: "<Q",
    I64: "<q",
    F64: "<d",
}


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def scalar(kind, value):
    return string(value) if kind == STRING else struct.pack(_PACK[kind], value)


def pair(key, kind, value):
    """One metadata pair: its key, its type and its value."""
    return string(key) + u32(kind) + scalar(kind, value)


def array(key, kind, values):
    """A metadata pair whose value is an array."""
    body = b"".join(scalar(kind, value) for value in values)
    return string(key) + u32(ARRAY) + u32(kind) + u64(len(values)) + body


def tensor(name, dims, kind, offset):
    """A tensor's record; ``dims`` in ggml's order, the row length first."""
    sizes = b"".join(u64(dim) for dim in dims)
    return string(name) + u32(len(dims)) + sizes + u32(kind) + u64(offset)


def gguf(pairs=(), tensors=(), data=b"", version=3, alignment=32, counts=(None, None)):
    """A whole file: header, padding and data; ``counts`` overrides what the header claims."""
    num_tensors = len(tensors) if counts[0] is None else counts[0]
    num_pairs = len(pairs) if counts[1] is None else counts[1]
    header = b"GGUF" + u32(version) + u64(num_tensors) + u64(num_pairs)
    header += b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data
