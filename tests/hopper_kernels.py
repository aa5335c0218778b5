"""What tests of kernels for Hopper share: launches emulated, mutants, and machine code."""

import ast
import re
import subprocess
from pathlib import Path

import torch
import triton

from ferrum_triton.gluon_emulator import EmulationError, run
from ferrum_triton.gluon_emulator.mutants import Mutant, mutants, reached
from ferrum_triton.gluon_emulator.twins import tree_of
from ferrum_triton.kernels.hopper import rings
from ferrum_triton.kernels.jit import OPTIONS


def emulate(launch, seed, mutant=None):
    constexprs = {k: v for k, v in launch.meta.items() if k not in OPTIONS}
    run(launch.kernel.jit, launch.grid, launch.args, constexprs, seed=seed, mutant=mutant)


def is_noticed(launch, out, mutant):
    want = out.clone()
    try:
        emulate(launch, 1, mutant)
    except EmulationError:
        return True
    finally:
        changed = not torch.equal(out, want)
        out.copy_(want)
    return changed


def without_a_ring(kernel):
    """The kernel without one of the uses that its roles make of rings."""
    uses = (rings.acquire, rings.wait_empty, rings.wait_full, rings.release)
    names = {each.fn.__name__ for each in uses}
    for function in reached(kernel):
        for node in ast.walk(tree_of(function)):
            called = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
            if isinstance(called, ast.Call) and getattr(called.func, "id", "") in names:
                yield without(function, node)


def without(function, node):
    tree = tree_of(function)
    for parent in ast.walk(tree):
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            for i, each in enumerate(body if isinstance(body, list) else ()):
                if (each.lineno, each.col_offset) == (node.lineno, node.col_offset):
                    body[i] = ast.copy_location(ast.Pass(), each)
    file = function.fn.__code__.co_filename
    return Mutant(function, tree, file, node.lineno, ast.unparse(node))


def softmax_runs_beside(code, consumers=2):
    """Whether exponentials stand between each consumer's wait for scores and that for values."""
    waits = [i for i, line in enumerate(code) if line.name.startswith("WARPGROUP.DEPBAR")]
    ends = [(i, waits[waits.index(i) + 1]) for i in waits if code[i].operands[1] == "0x1"]
    between = [sum(line.name == "MUFU.EX2" for line in code[begin:end]) for begin, end in ends]
    return len(between) == consumers and min(between) >= 32


def warnings_of(ptx):
    """What the assembler says of products that it had to put in a row."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [tool, "-v", "--gpu-name=sm_90a", "-", "-o", "/dev/null"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return [line for line in said.splitlines() if re.search(r"C75\d\d|serializ|warning", line)]


def unnoticed(launches):
    """What can be left out of a kernel, of its own statements and its uses of rings.

    Args:
        launches: (launch, the output it left), for each part of the kernel that constants choose.
    """
    kernel = launches[0][0].kernel.jit
    without = [*mutants(kernel), *without_a_ring(kernel)]
    assert len(without) >= 20
    return [str(m) for m in without if not any(is_noticed(*each, m) for each in launches)]
