"""Clocks that a loop of float32 products takes to issue, by the banks of its registers: read from SASS.

A register's bank is its number's parity, and a bank reads one register (of all lanes) a clock. A product that reads
three may wait, and delay the next ones. SASS marks operands that are not read again: ``.reuse`` keeps one for the next
instruction, if that has the same register in the same place.
"""

import re

BACKLOG = 1  # clocks that a read may wait for its bank before the instruction does

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*)")


def clocks_a_product(loop: str) -> float:
    """Clocks for each FFMA in which one warp alone could issue the loop."""
    clock, products, busy, kept = 0, 0, [0, 0], {}
    for name, operands in _INSTRUCTION.findall(loop):
        clock += 1
        read, now_kept = _read(name, operands, kept)
        for register in read:
            busy[register % 2] = max(busy[register % 2], clock) + 1
        clock = max(clock, max(busy) - 1 - BACKLOG)
        kept = now_kept
        products += name == "FFMA"
    return clock / products


def _read(name: str, operands: str, kept: dict[int, int]) -> tuple[list[int], dict[int, int]]:
    """Registers that an instruction reads, and those kept for the next, by place."""
    read, now_kept = [], {}
    for place, operand in enumerate(operands.split(",")[0 if name.startswith("ST") else 1 :]):
        for number, mark in re.findall(r"(?<!U)R(\d+)(\.reuse)?", operand):
            if kept.get(place) != int(number):
                read.append(int(number))
            if mark:
                now_kept[place] = int(number)
    return read, now_kept
