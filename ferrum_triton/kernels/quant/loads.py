"""Loads of words and of narrower integers, each by the thread that needs it.

By PTX several words are one load. Triton's own loads can be as wide only in a layout that the
activations would have to be moved to. Elsewhere (the interpreter, AMD) each is loaded by itself.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def load_asm(count, hint, masked):
    """PTX that loads ``count`` words at once, 0 where masked off."""
    words = ", ".join(f"${i}" for i in range(count))
    load = f"ld.global{hint}.v{count}.b32 {{{words}}}, [${count}];"
    if not masked:
        return load
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    return f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {load} }}"


@triton.constexpr_function
def load_constraints(count, masked):
    return ",".join(["=r"] * count + ["l"] + ["r"] * masked)


@triton.jit
def load_words(ptr, mask, COUNT: tl.constexpr, ASM: tl.constexpr, HINT: tl.constexpr):
    """COUNT int32 words that follow each other, as a tuple; 0 where masked off.

    Args:
        ptr: int32 pointers [threads], for ASM at multiples of 4 COUNT bytes.
        mask: [threads], or None.
        ASM: load them at once, by PTX, where COUNT is 2 or 4.
        HINT: of that PTX, to the caches.

    Not pure, so that loads stay on their side of a wait for the launch before.
    """
    if ASM:
        if mask is None:
            args = [ptr.to(tl.int64)]
        else:
            args = [ptr.to(tl.int64), mask.to(tl.int32)]
        if COUNT == 4:
            words = tl.inline_asm_elementwise(
                load_asm(4, HINT, mask is not None),
                load_constraints(4, mask is not None),
                args,
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
        else:
            words = tl.inline_asm_elementwise(
                load_asm(2, HINT, mask is not None),
                load_constraints(2, mask is not None),
                args,
                dtype=(tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
    else:
        words = ()
        for i in tl.static_range(COUNT):
            words += (load_one(ptr + i, mask),)
    return words


@triton.jit
def load_one(ptr, mask):
    """What ``ptr`` points at, 0 where masked off."""
    if mask is None:
        x = tl.load(ptr)
    else:
        x = tl.load(ptr, mask=mask, other=0)
    return x


@triton.constexpr_function
def narrow_asm(bits, masked):
    """PTX that loads an integer of fewer bits than its register has, 0 where masked off."""
    load = f"ld.global.u{bits} $0, [$1];"
    if not masked:
        return load
    return f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p {load} }}"


@triton.jit
def load_narrow(ptr, mask, ASM: tl.constexpr):
    """Unsigned integers as int32 [threads]; 0 where masked off.

    By PTX in registers of 32 bits from the start: Triton packs what it takes for narrower where it
    masks it or a loop carries it. Q3_K has three of them; kinds with fewer need more registers with
    these loads, which keep their order, and may spill.
    """
    if ASM:
        BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
        if mask is None:
            args = [ptr.to(tl.int64)]
        else:
            args = [ptr.to(tl.int64), mask.to(tl.int32)]
        x = tl.inline_asm_elementwise(
            narrow_asm(BITS, mask is not None), load_constraints(1, mask is not None), args,
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        x = load_one(ptr, mask).to(tl.int32)
    return x
