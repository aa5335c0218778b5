"""PTX written line by line: for inline assembly that depends on a format's description."""

import triton

# Selectors of a byte permute: bytes 0 to 3 of the first word, and of the second from bit 2 on.
_IDENTITY = 0x32103210


class Asm:
    """Lines of PTX and the temporaries they use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names = 0

    def new(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def op(self, name: str, *args: str, to: str = "") -> str:
        to = to or self.new()
        self.lines.append(f"{name} {to}, {', '.join(args)};")
        return to

    def shifted(self, word: str, left: int) -> str:
        """word << left, >> if that is negative."""
        if left == 0:
            return word
        return self.op("shl.b32" if left > 0 else "shr.u32", word, str(abs(left)))

    def merged(self, mask: int, word: str, other: str) -> str:
        """word where mask has bits, other elsewhere."""
        return self.op("lop3.b32", word, other, f"0x{mask:08X}", "0xE4")

    def looked_up(
        self, word: str, values: tuple[int, ...], bias: int, to: tuple[str, str] = ("", "")
    ) -> tuple[str, str]:
        """The values, plus bias, of a word's eight codes of four bits.

        Two permutes look a code's lower three bits up in either half of the table, and a third one
        takes the byte that its highest bit says.

        Returns:
            Words of the values of the lower codes of each byte, and of the upper ones.
        """
        table = [self.op("mov.b32", f"0x{word_of_values(values, i, bias):08X}") for i in range(4)]
        index = self.op("lop3.b32", word, "0x77777777", "0", "0xC0")
        upper = self.op("shr.u32", word, "1")
        upper = self.op("lop3.b32", upper, "0x44444444", f"0x{_IDENTITY:08X}", "0xEA")
        halves = []
        for half in range(2):
            if half:
                index, upper = self.shifted(index, -16), self.shifted(upper, -16)
            low = self.op("prmt.b32", table[0], table[1], index)
            high = self.op("prmt.b32", table[2], table[3], index)
            halves.append(self.op("prmt.b32", low, high, upper))
        lower = self.op("prmt.b32", *halves, "0x6420", to=to[0])
        return lower, self.op("prmt.b32", *halves, "0x7531", to=to[1])

    def text(self) -> str:
        temporaries = ", ".join(f"t{i + 1}" for i in range(self.names))
        return "{\n.reg .b32 " + temporaries + ";\n" + "\n".join(self.lines) + "\n}"


@triton.constexpr_function
def word_of_values(values, i, bias):
    """Values 4 i to 4 i + 3, plus bias, as the bytes of a word; 0 where there are none."""
    some = [(value + bias) % 256 for value in values[4 * i : 4 * i + 4]]
    return int.from_bytes(bytes(some), "little")
