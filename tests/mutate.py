"""Single mutations of the code, each held against the tests of its family.

    python -m tests.mutate --count 20                      drawn from the whole package
    python -m tests.mutate ferrum_triton/contract.py       drawn from a file or folder
    python -m tests.mutate --from mutations.json           a list of {file, before, after}

A mutation that no test notices shows what nobody checks. Each runs in a copy of the tree, and what
is drawn follows from ``--seed``. The last line is the share that was noticed, by a failure or by
tests that no longer ended. With ``--out`` a run goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Tests that stand for a part of the tree, a path taking the longest prefix: pytest's -k for
# test_ops, and files of tests, with their own -k behind an @.
K = "ferrum_triton/kernels/"
OPS = "ferrum_triton/ops/"
METAL = "ferrum_triton/backends/metal/"
QUANT = "interpret and quant and not moe"
PAGED = "test_paged_launches test_paged_attention test_paged_tokens"
SMALL_M = "test_small_m test_block_factors test_ptx_only"
PACKED = (
    "",
    "test_hopper_packed test_hopper_packed_sums test_hopper_packed_offsets "
    "test_hopper_packed_experts test_hopper_packed_ragged test_hopper_packed_pingpong "
    "test_hopper_packed_ahead",
)
FAMILIES = {
    K: ("", "test_launch test_rows test_replay test_norm_laws"),
    K + "ahead": ("", "test_ahead"),
    K + "advance": ("interpret and advance", "test_graph"),
    K + "compiled": ("", "test_ahead test_launch test_replay"),
    K + "gpu": ("", "test_tuning test_tune test_flash_laws"),
    K + "interpreter": ("interpret and rms_norm", "test_backends"),
    K + "gluon": ("", "test_gluon test_hopper_gemm"),
    K + "hopper/": ("", "test_hopper_gemm test_hopper_attention test_hopper_paged"),
    K + "hopper/attention": (
        "",
        "test_flash_config test_hopper_attention test_hopper_paged test_paged_tokens",
    ),
    K + "hopper/attention_codes": ("", "test_hopper_paged_codes"),
    K + "hopper/mla": ("", "test_hopper_mla"),
    K + "hopper/packed": PACKED,
    K + "hopper/packed_sums": ("", "test_hopper_packed_sums test_hopper_packed"),
    K + "hopper/packed_experts": ("", "test_hopper_packed_experts"),
    K + "hopper/packed_offsets": ("", "test_hopper_packed_offsets"),
    K + "hopper_config": ("", "test_hopper_gemm test_hopper_packed test_shipped"),
    K + "jit": ("", "test_launch test_replay test_backends test_tuning"),
    K + "linear": ("interpret and gemm and not quant", "test_gemm"),
    K + "linear_attention": (
        "interpret and (gdn or conv1d or gated_rms)",
        "test_gdn test_gdn_layer",
    ),
    K + "machine_code": ("", "test_machine_code"),
    K + "rehearsal": ("", "test_replay test_gemm"),
    K + "sass": (
        "",
        "test_overwritten_operands test_unset_registers test_spills test_gemm test_quant_sass "
        "test_small_m",
    ),
    K + "sources": ("", "test_ahead"),
    K + "norm": ("interpret and norm", "test_norm_laws"),
    K + "shadow": ("interpret and (rms_norm_to or rms_norm_add)", "test_norm_laws"),
    K + "rope": ("interpret and (rope or split_qkv)", "test_rope_laws"),
    K + "heads": ("interpret and (rope or split_qkv)", "test_rope_laws test_paged_cache"),
    K + "elementwise": ("interpret and (lu or add or scale or slice)", "test_elementwise_laws"),
    K + "embedding": ("interpret and embedding", "test_launch"),
    K + "slots": (
        "interpret and (combine or weighted or moe_id_sum)",
        "test_moe_combine test_moe_sum",
    ),
    K + "softmax": ("interpret and softmax", "test_sampling_ops test_softmax_long"),
    K + "kv_": ("interpret and cache", "test_paged_cache"),
    K + "paged_cache": ("interpret and cache", "test_paged_cache"),
    K + "sampl": ("interpret and (rows or penalty)", "test_sampling_ops"),
    K + "shortcuts": ("", "test_shortcuts"),
    K + "resources": ("", "test_launch test_quant_sass"),
    K + "parameters": ("", "test_tuning test_tune"),
    K + "tuning": ("", "test_tuning test_tune test_shipped"),
    K + "tables": ("", "test_tuning test_shipped"),
    K + "attention/": (
        "interpret and (attention or merge)",
        "test_paged_ahead test_merge test_paged_attention test_flash_laws test_paged_tokens",
    ),
    K + "attention/flash": ("interpret and flash", "test_flash_laws test_flash_config"),
    K + "attention/mla": ("interpret and mla", "test_mla test_mla_launches test_hopper_mla"),
    K + "attention/strips": ("", "test_strips"),
    K + "attention/paged_step": ("interpret and qkv_paged", "test_paged_step"),
    K + "attention/new_heads": ("interpret and qkv_paged", "test_paged_step"),
    K + "attention/paged": ("interpret and paged", PAGED),
    K + "attention/prefill": ("", "test_paged_launches test_hopper_paged"),
    K + "quant": (
        QUANT,
        "test_quant_planes test_quant_mma test_quant_mma_kinds test_gemv_repacked test_small_m "
        "test_quant_fused test_quant_ops",
    ),
    K + "quant/descriptors": ("", "test_moe_planes test_quant_mma"),
    K + "quant/packed_config": PACKED,
    K + "quant/packed_costs": (
        "",
        "test_packed_costs test_hopper_packed_ragged test_hopper_packed test_shipped",
    ),
    K + "quant/mma_config": ("", "test_quant_mma test_recorded"),
    K + "quant/plane_rows": ("", "test_quant_planes test_quant_mma"),
    K + "quant/add_norm": ("interpret and add_rms_norm_quant", "test_add_norm"),
    K + "quant/open_norm": ("interpret and open_norm", "test_open_norm"),
    K + "open_norm": ("interpret and (open_norm or linear_add)", "test_linear_norm"),
    K + "quant/gemv_plan": (QUANT, "test_gemv_repacked test_open_norm"),
    K + "quant/float_groups": ("interpret and quant", "test_ptx_only"),
    K + "quant/ptx": ("interpret and quant", "test_quant_sass test_ptx_only"),
    K + "quant/small_m": (QUANT, SMALL_M),
    K + "quant/block_factors": ("", "test_block_factors"),
    K + "quant/activations": (QUANT, "test_arranged test_block_factors test_quant_mma"),
    K + "quant/quad_products": (QUANT, f"{SMALL_M} test_moe_quads"),
    K + "quant/gemv.": ("interpret and gemv_quant", "test_kernels_compile@gemv_quant"),
    K + "quant/rows": ("interpret and (dequantize or lookup_quant)", "test_quant_planes"),
    K + "moe/": (
        "interpret and (moe or topk or weighted or ids_tpe)",
        "test_moe test_moe_combine test_moe_quant",
    ),
    K + "moe/dense_sum": ("interpret and moe_id_sum", "test_moe_sum"),
    K + "moe/sum_config": ("interpret and moe_id_sum", "test_moe_sum"),
    K + "moe/plane": ("interpret and quant_moe", "test_moe_planes test_moe"),
    K + "moe/plane_config": ("", "test_moe_planes test_moe_quads test_hopper_packed_experts"),
    K + "moe/quad_tiles": ("", "test_moe_quads test_moe_mlp"),
    K + "moe/next_product": ("", "test_moe_mlp"),
    K + "moe/expert_sum": ("interpret and moe_id_sum", "test_expert_sum"),
    K + "moe/tile_table": ("", "test_hopper_packed_experts"),
    K + "moe/prepare_sorted": ("", "test_hopper_packed_experts"),
    K + "moe/buckets": ("interpret and moe", "test_moe_buckets test_moe_planes"),
    K + "moe/routing": ("interpret and topk", "test_moe"),
    K + "moe/activation": ("interpret and clamped_swiglu", "test_gpt_oss"),
    K + "moe/combine": ("interpret and (combine or weighted)", "test_moe_combine"),
    K + "fp8/experts_sum": ("interpret and moe_id_sum_fp8", "test_moe_sum"),
    K + "fp8/": ("interpret and fp8", "test_fp8 test_fp8_codes test_fp8_experts"),
    OPS: ("", "test_recorded@refusals test_registry test_costs test_door test_strides"),
    OPS + "precision": ("cpu and norm", "test_registry"),
    "ferrum_triton/backends/": (
        "dispatcher_agrees and rms_norm",
        "test_backends test_registry test_structure test_replay test_models",
    ),
    "ferrum_triton/backends/door": ("", "test_door test_replay"),
    METAL: ("", "metal_shaders"),
    METAL + "__init__": ("", "test_backends"),
    METAL + "attention": ("", "metal_shaders@attention or keys or sequences"),
    METAL + "combine": ("", "metal_shaders@weighted_sum"),
    METAL + "elementwise": ("", "metal_shaders@gelu or lu_mul"),
    METAL + "embedding": ("", "metal_shaders@embedding"),
    METAL + "norm": ("", "metal_shaders@norm"),
    METAL + "pool": ("", "metal_shaders@cache or pool or attention"),
    METAL + "quant": ("", "metal_shaders@quant or kind or ids"),
    METAL + "rope": ("", "metal_shaders@rope or qkv"),
    METAL + "routing": ("", "metal_shaders@route or tpe"),
    METAL + "sampling": ("", "metal_shaders@argmax"),
    METAL + "shader": ("", "metal_shaders@not sanitized and not barrier and not edge_values"),
    "ferrum_triton/backends/torch_delta": ("cpu and gdn", "test_gdn test_gdn_layer"),
    "ferrum_triton/backends/torch_ops": ("cpu and not quant", "test_backends test_flash_laws"),
    "ferrum_triton/backends/torch_moe": ("cpu and (moe or topk or weighted)", "test_moe"),
    "ferrum_triton/backends/torch_paged": (
        "cpu and (paged or cache)",
        "test_paged_cache test_paged_attention",
    ),
    "ferrum_triton/gluon_emulator/": ("", "test_gluon_emulator test_gluon_values test_gluon"),
    "ferrum_triton/contract": ("refused", "test_door test_agreement test_registry"),
    "ferrum_triton/overlap": ("", "test_door"),
    "ferrum_triton/registry": ("rms_norm", "test_registry test_door test_costs"),
    "ferrum_triton/testing": ("cpu and rms_norm", "test_contributing test_testing"),
    "ferrum_triton/quant/": (
        "cpu and quantize",
        "test_quant_formats test_quant_load test_finite test_quant_planes",
    ),
    "ferrum_triton/files/": (
        "",
        "test_limits test_gguf_reader test_gguf_hostile test_safetensors test_tokenizer "
        "test_tokenizer_directory test_chat test_chat_hostile",
    ),
    "ferrum_triton/files/new_path": ("", "test_quantize test_quantize_gguf"),
    "ferrum_triton/files/gguf_vocabulary": ("", "test_quantize_gguf"),
    "ferrum_triton/quant/float4": ("", "test_float4_weights"),
    "ferrum_triton/quant/gptq": ("", "test_rounding test_quantize"),
    "ferrum_triton/quant/reordered": ("", "test_reordered"),
    "ferrum_triton/quant/rounding": ("", "test_rounding test_quantize"),
    "ferrum_triton/models/": (
        "",
        "test_limits test_engine test_models test_mixtures test_gemma3 test_gpt_oss test_bert "
        "test_packed_models test_generate test_runner",
    ),
    "ferrum_triton/models/bert": ("", "test_bert"),
    "ferrum_triton/models/experts": ("", "test_mixtures test_expert_parallel test_moe_sum"),
    "ferrum_triton/models/gemma3": ("", "test_gemma3"),
    "ferrum_triton/models/gpt_oss": ("", "test_gpt_oss"),
    "ferrum_triton/models/linear": (
        "",
        "test_open_norm test_linear_norm test_models test_add_norm",
    ),
    "ferrum_triton/models/quantize": ("", "test_quantize test_quantize_gguf"),
    "ferrum_triton/models/qwen35": ("", "test_qwen35 test_qwen35_engine"),
    "ferrum_triton/integrations/": (
        "",
        "test_convert test_transformers_attention test_flash_attn_door",
    ),
    "ferrum_triton/integrations/transformers/delta_net": ("", "test_convert_delta_net"),
    "ferrum_triton/integrations/flash_attn": ("", "test_flash_attn_door"),
    "ferrum_triton/runtime/": (
        "",
        "test_runtime test_runtime_kv_cache test_sampling test_graph test_collective "
        "test_expert_parallel",
    ),
    "ferrum_triton/runtime/expert_parallel": ("", "test_expert_parallel"),
    "ferrum_triton/runtime/states": ("", "test_runtime_kv_cache test_qwen35_engine"),
    "ferrum_triton/cli/": ("", "test_cli test_cli_failures"),
    "ferrum_triton/cli/quantize": ("", "test_quantize test_quantize_gguf"),
    "ferrum_triton/__main__": ("", "test_cli"),
    "ferrum_triton/types": ("", "test_moe test_runtime_kv_cache test_runtime"),
    "ferrum_triton/": ("rms_norm", "test_registry test_backends test_structure"),
}

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
CALLS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "cdiv": "min"}


@dataclass(frozen=True)
class Mutation:
    """One change of a file: what stands there before and after."""

    file: str
    before: str
    after: str
    line: int = 1
    column: int = 0


def mutations_of(path: Path) -> Iterator[Mutation]:
    """Every single change of a Python file that the rules below know."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def source(node: ast.AST) -> str:
        begin = starts[node.lineno - 1] + node.col_offset
        return raw[begin : starts[node.end_lineno - 1] + node.end_col_offset].decode()

    def between(left: ast.AST, right: ast.AST, new: str, node: ast.AST) -> str:
        """The node's source with another operator between two of its parts."""
        begin = starts[node.lineno - 1] + node.col_offset
        middle = starts[left.end_lineno - 1] + left.end_col_offset - begin
        end = starts[right.lineno - 1] + right.col_offset - begin
        whole = source(node).encode()
        old = whole[middle:end].decode()
        brackets = old.count(")"), old.count("(")
        return (
            whole[:middle] + (")" * brackets[0] + f" {new} " + "(" * brackets[1]).encode()
            + whole[end:]
        ).decode()  # fmt: skip

    tree = ast.parse(text)
    unread = {id(part) for note in _without_effect(tree) for part in ast.walk(note)}
    for node in ast.walk(tree):
        after = []
        if id(node) in unread:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            new = COMPARISONS[type(node.ops[0])]
            after.append(between(node.left, node.comparators[0], new, node))
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            after.append(between(node.left, node.right, OPERATORS[type(node.op)], node))
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            new = "or" if isinstance(node.op, ast.And) else "and"
            after.append(between(*node.values, new, node))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            after.append(source(node.operand))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            after.append(str(not node.value if type(node.value) is bool else node.value + 1))
        elif isinstance(node, ast.Call):
            name = source(node.func)
            stem = name.rpartition(".")[2]
            if stem in CALLS and not node.keywords and len(node.args) > 1:
                after.append(
                    name[: len(name) - len(stem)] + CALLS[stem] + source(node)[len(name) :]
                )
            elif stem == "to" and len(node.args) == 1:
                after.append(source(node.func.value))
        elif isinstance(node, ast.Raise | ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            after.append("pass")
        for changed in after:
            file, column = str(path.relative_to(ROOT)), node.col_offset
            yield Mutation(file, source(node), changed, node.lineno, column)


def _without_effect(tree: ast.Module) -> Iterator[ast.AST]:
    """What decides no result of the package, each kind with its reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation  # Python does not evaluate types
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.keyword) and node.arg == "num_stages":
            yield node.value  # steps of a loop in flight
        elif isinstance(node, ast.keyword) and node.arg == "is_pure":
            if ast.unparse(node.value) == "True":  # without the promise the compiler moves less
                yield node.value
        elif isinstance(node, ast.Call) and "prefetch" in ast.unparse(node.func):
            yield node  # lines that come to L2 are as they were
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lru_cache"):
            yield node  # what is forgotten is computed again
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass":
            yield node  # what it forbids, such as writing to a field, no code does
    yield from _drawn_by_tests(tree)


def _drawn_by_tests(tree: ast.Module) -> list[ast.AST]:
    """An op's axes, bench cases and samples, and what nothing else of its module reads.

    A bench of another shape is no mistake of the package, nor is a test's value another.
    """
    skipped: list[ast.AST] = []
    named: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("axes", "bench"):
            skipped.append(node.value)
        elif isinstance(node, ast.FunctionDef):
            if [argument.arg for argument in node.args.args[:1]] == ["make"]:
                skipped.append(node)
            elif node.name.startswith("_"):
                named[node.name] = node
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.endswith(("_AXES", "_CASES")):
                skipped.append(node)
            named[name] = node
    while True:
        inside = {id(part) for node in skipped for part in ast.walk(node)}
        readers: dict[str, list[bool]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                readers.setdefault(node.id, []).append(id(node) in inside)
        more = [
            n
            for name, n in named.items()
            if id(n) not in inside and all(readers.get(name, [False]))
        ]
        if not more:
            return skipped
        skipped += more


def applied(text: str, mutation: Mutation) -> str:
    """The file's text with the mutation, at its line where the text stands there.

    Raises:
        ValueError: what it changes is not in the file any more.
    """
    lines = text.splitlines(keepends=True)
    head = "".join(lines[: mutation.line - 1])
    at = text.find(mutation.before, len(head) + mutation.column)
    at = text.find(mutation.before) if at < 0 else at
    if at < 0:
        raise ValueError(f"{mutation.file} has no {mutation.before!r}")
    return text[:at] + mutation.after + text[at + len(mutation.before) :]


def tests_of(file: str) -> tuple[str, ...]:
    """pytest's arguments for the family of a file."""
    targets = _family(file)
    if file.startswith(OPS):
        # Kernels are held against the definition in float64, and what of it serves a CPU in 16.
        kernels = [t.replace("interpret and ", "") for t in _family(K + file.removeprefix(OPS))]
        targets = [*kernels, *targets]
    elif file.startswith(K):
        if "Tunable" in (ROOT / file).read_text() or file.endswith("_config.py"):
            targets.append("tests/test_shipped.py@heuristic")
        targets += ["tests/test_pdl.py", "tests/test_recorded.py@launches or choices"]
        targets.append("tests/test_defaults.py")
    return tuple(targets)


def _family(file: str) -> list[str]:
    words, names = FAMILIES[max((f for f in FAMILIES if file.startswith(f)), key=len)]
    targets = []
    for name in re.split(r" (?=test_|metal_)", names):
        module, at, of_module = name.partition("@")
        folder = module == "metal_shaders"
        targets.append(f"tests/{module}{'' if folder else '.py'}{at}{of_module}")
    return targets + [f"tests/test_ops.py@{words}"] * bool(words)


def run(tree: Path, targets: tuple[str, ...], seconds: float) -> str:
    """ "noticed", "lived" or "timed out"."""
    limit = time.monotonic() + seconds
    for target in targets:
        path, _, words = target.partition("@")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", path]
        command += ["-k", words] if words else []
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env=os.environ | {"CI": "1"},  # the same examples with the mutation and without
                capture_output=True,
                timeout=max(limit - time.monotonic(), 1),
            )
        except subprocess.TimeoutExpired:
            return "timed out"
        if done.returncode not in (0, 5):  # 5: no test was selected
            return "noticed"
    return "lived"


def drawn(paths: list[str], count: int, seed: int) -> list[Mutation]:
    """Mutations of the files under some paths: a file first, so that long ones are no likelier."""
    files = [
        file
        for path in paths
        for file in ([ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py")))
    ]
    choices = random.Random(seed)
    options = {file: list(mutations_of(file)) for file in files}
    files = [file for file in files if options[file]]
    return [choices.choice(options[choices.choice(files)]) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", default=["ferrum_triton"], help="files or folders")
    parser.add_argument("--count", type=int, default=20, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="after which tests do not end")
    parser.add_argument("--from", dest="listed", type=Path, help="a JSON list instead of drawing")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON lines")
    options = parser.parse_args()
    if options.listed:
        listed = json.loads(options.listed.read_text())
        listed = listed["mutations"] if isinstance(listed, dict) else listed
        names = [field.name for field in fields(Mutation)]
        chosen = [Mutation(**{n: m[n] for n in names if n in m}) for m in listed]
    else:
        chosen = drawn(options.paths, options.count, options.seed)
    results = []
    if options.out and options.out.exists():
        known = [json.loads(line) for line in options.out.read_text().splitlines()]
        results = [mutation.pop("result") for mutation in known]
        done = [Mutation(**mutation) for mutation in known]
        chosen = [mutation for mutation in chosen if mutation not in done]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, tree, ignore=skipped)
        for mutation in chosen:
            target = tree / mutation.file
            try:
                original = target.read_text()
                changed = applied(original, mutation)
                target.write_text(changed)
                result = run(tree, tests_of(mutation.file), options.seconds)
                target.write_text(original)
            except (OSError, ValueError) as error:
                result = f"gone: {error}"
            results.append(result)
            place = f"{mutation.file}:{mutation.line}"
            change = f"{mutation.before[:60]!r} -> {mutation.after[:60]!r}"
            print(f"{result.partition(':')[0]:10} {place} {change}", flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps({**asdict(mutation), "result": result}) + "\n")
    held = [result for result in results if not result.startswith("gone")]
    noticed = sum(result != "lived" for result in held)
    print(f"{noticed} of {len(held)} noticed ({100 * noticed / max(len(held), 1):.0f} %)")


if __name__ == "__main__":
    main()
