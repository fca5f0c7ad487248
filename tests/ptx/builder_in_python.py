"""An IR builder that computes at once: the code of an intrinsic, in Python, on one memory of bytes."""

import re
import struct
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import types

KINDS = {"f2": types.float16, "f4": types.float32, "f8": types.float64, "u2": types.uint16, "i4": types.int32}
FLOATS = {ir.FloatType: np.float32, ir.DoubleType: np.float64}
PATTERNS = {  # PTX, and its operands' result
    r"shf\.r\.wrap\.b32 \$0, \$1, \$2, \$3;": lambda b, low, high, by: (high << 32 | low) >> by % 32,
    r"cvt\.rn\.bf16x2\.f32 \$0, \$1, \$2;": lambda b, high, low: bfloat16(high) << 16 | bfloat16(low),
    r"{\.reg \.b16 b, a; cvt\.rn\.f16\.f32 b, \$1; cvt\.rn\.f16\.f32 a, \$2; mov\.b32 \$0, {a, b};}": (
        lambda b, high, low: half(high) << 16 | half(low)
    ),
    r"{\.reg \.b16 low, high; mov\.b32 {low, high}, \$1; cvt\.f32\.f16 \$0, (low|high);}": (
        lambda b, word, which: of_half(word >> 16 if which == "high" else word)
    ),
    r"cvt\.f32\.f16 \$0, \$1;": lambda b, word: of_half(word),
    r"{\.reg \.pred inside; setp\.lt\.u32 inside, \$1, \$2; "
    r"mov\.b(\d+) \$0, 0; @inside ld\.global\.b(\d+) \$0, \[\$3\];}": lambda b, *told: b.guarded(*told),
    r"cp\.async\.cg\.shared\.global \[\$0\+(\d+)\], \[\$1\+(\d+)\], 16;": lambda b, *told: b.copied(*told),
}


def bfloat16(value):
    (bits,) = struct.unpack("I", struct.pack("f", value))
    assert bits % 2**16 == 0, "exact numbers"
    return bits >> 16


def half(value):
    return int(np.float16(value).view(np.uint16))


def of_half(word):
    return np.uint16(word % 2**16).view(np.float16)


def bytes_of(kind):
    if isinstance(kind, ir.VectorType):
        return kind.count * bytes_of(kind.element)
    return kind.width // 8 if isinstance(kind, ir.IntType) else 4 if isinstance(kind, ir.FloatType) else 8


def value_type(kind):
    if isinstance(kind, types.Float) and kind.bitwidth > 16:
        return ir.FloatType() if kind.bitwidth == 32 else ir.DoubleType()
    return ir.IntType(1 if kind == types.boolean else kind.bitwidth)


CONTEXT = SimpleNamespace(
    get_value_type=value_type,
    get_dummy_value=lambda: None,
    make_tuple=lambda builder, kind, values: values,
    make_array=lambda kind: lambda context, builder, array: array,
)


class Value:
    def __init__(self, kind, number):
        self.type = kind
        if isinstance(kind, ir.IntType):
            number = int(number) % 2**kind.width
        elif type(kind) in FLOATS:
            number = FLOATS[type(kind)](number)
        self.number = number


def number(value):
    if isinstance(value, ir.Constant):
        if value.constant is ir.Undefined:
            return [None] * value.type.count
        return Value(value.type, value.constant).number
    return value.number


def signed(value):
    bits = number(value)
    return bits - (bits >> value.type.width - 1 << value.type.width)


def run(builder, text, registers):
    """PTX of moves, loads, stores and copies, whose registers hold bits; ``p`` is a predicate."""

    def value(name, size):
        if name[0] == "{":
            parts = [value(one, size // 2) for one in name.strip("{}").split(", ")]
            return sum(part << z * size // 2 * 8 for z, part in enumerate(parts))
        return int(registers.get(name, name)) % 2 ** (8 * size)

    body = text.strip()[1:-1] if text.startswith("{") else text
    for statement in filter(None, map(str.strip, body.split(";"))):
        wanted, name, told = re.fullmatch(r"(?:@(p) )?(\S+) (.*)", statement).groups()
        operands = re.findall(r"{.*?}|[^,\s]+", told)
        if name.startswith(".reg") or (wanted and not registers["p"]):
            continue
        operation, *of, kind = name.split(".")
        size = int(kind[1:]) // 8 if kind[1:].isdigit() else 0
        places = [one.strip("{}[] ") for one in operands]
        if operation == "setp":
            registers["p"] = value(operands[1], 4) != value(operands[2], 4)
        elif operation == "mov" and operands[0][0] == "{":
            for z, one in enumerate(places[0].split(", ")):
                registers[one] = value(operands[1], size) >> 8 * size // 2 * z & 2 ** (4 * size) - 1
        elif operation == "mov":
            registers[operands[0]] = value(operands[1], size)
        elif operation in ("ld", "st"):
            at, names = (places[1], places[0]) if operation == "ld" else (places[0], places[1])
            names = names.split(", ")
            assert of[1:] == ([f"v{len(names)}"] if len(names) > 1 else [])
            for z, one in enumerate(names):
                place = value(at, 8) + z * size
                if operation == "ld":
                    registers[one] = builder.at(place, size, size if z else size * len(names))
                else:
                    builder.write(place, value(one, size), size, size if z else size * len(names))
        else:
            assert name in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"), name
            target, source, count, *used = (value(one, 8) for one in places)
            assert (count == 16) == ("cg" in name)
            assert target % count == source % count == 0
            for z in range(count):
                builder.write(target + z, 0 if used and z >= used[0] else builder.at(source + z, 1, 1), 1)


class Builder:
    def __init__(self, size=4096):
        self.memory, self.used, self.runs = np.zeros(size, np.uint8), 0, True
        self.read, self.written, self.blocks = set(), set(), 0

    def array(self, values, kind=None):
        """An argument: an array of Numba's type, or of an element's storage."""
        values = np.asarray(values)
        begin = self.used = -(-self.used // 16) * 16 + 16  # between arrays, bytes of nobody
        self.used += values.nbytes
        assert self.used + 16 <= self.memory.size
        view = self.memory[begin : self.used].view(values.dtype)
        view[:] = values
        kind = kind or KINDS[values.dtype.str[1:]]
        pointer = Value(ir.PointerType(value_type(kind)), begin)
        return SimpleNamespace(data=pointer, type=types.Array(kind, 1, "C"), view=view, begin=begin)

    def call(self, function, arguments):
        text, result = function.asm, function.function_type.return_type
        constraints = function.constraint.split(",")
        letters = [c for c in constraints if not c.startswith(("=", "~"))]
        assert len(letters) == len(arguments)
        sizes = {"h": ir.IntType(16), "r": ir.IntType(32), "l": ir.IntType(64)}
        sizes |= {"f": ir.FloatType(), "d": ir.DoubleType()}
        assert all(sizes[letter] == argument.type for letter, argument in zip(letters, arguments, strict=True))
        results = [*result.elements] if isinstance(result, ir.LiteralStructType) else [result]
        results = [] if isinstance(result, ir.VoidType) else results
        written = [letter for kind in results for letter, of in sizes.items() if of == kind]
        assert [c.strip("=&") for c in constraints if c.startswith("=")] == written
        for pattern, compute in PATTERNS.items():
            if found := re.fullmatch(pattern, text):
                return Value(result, compute(self, *map(number, arguments), *found.groups()))
        registers = {f"${len(results) + k}": self.bits(a) for k, a in enumerate(arguments)}
        run(self, text, registers)
        values = [self.of_bits(kind, registers[f"${z}"]) for z, kind in enumerate(results)]
        return values[0] if len(values) == 1 else Value(result, values)

    def extract_value(self, several, z):
        return several.number[z]

    def guarded(self, position, length, address, zero, size):
        assert zero == size
        return self.at(address, int(size) // 8, 1) if position < length else 0

    def copied(self, target, source, more, beyond):
        for z in range(16):
            self.write(target + int(more) + z, self.at(source + int(beyond) + z, 1, 1), 1)
        assert (target + int(more)) % 16 == (source + int(beyond)) % 16 == 0

    def at(self, address, size, align):
        if not self.runs:
            return 0
        assert address % align == 0, "misaligned"
        self.read |= set(range(address, address + size))
        return int.from_bytes(self.memory[address : address + size].tobytes(), "little")

    def write(self, address, bits, size, align=1):
        if self.runs:
            assert address % align == 0, "misaligned"
            self.written |= set(range(address, address + size))
            self.memory[address : address + size] = [*int(bits).to_bytes(size, "little")]

    def bits(self, value):
        if isinstance(value.type, ir.VectorType):
            size = 8 * bytes_of(value.type.element)
            return sum(self.bits(Value(value.type.element, one)) << z * size for z, one in enumerate(value.number))
        if type(value.type) in FLOATS:
            return int.from_bytes(value.number.tobytes(), "little")
        return value.number

    def of_bits(self, kind, bits):
        if isinstance(kind, ir.VectorType):
            size = 8 * bytes_of(kind.element)
            return Value(kind, [self.of_bits(kind.element, bits >> z * size).number for z in range(kind.count)])
        if type(kind) in FLOATS:
            part = bits % 2 ** (8 * bytes_of(kind))
            return Value(kind, np.frombuffer(part.to_bytes(bytes_of(kind), "little"), FLOATS[type(kind)])[0])
        return Value(kind, bits)

    def load(self, pointer, align=None):
        kind = pointer.type.pointee
        return self.of_bits(kind, self.at(pointer.number, bytes_of(kind), align or bytes_of(kind)))

    def store(self, value, pointer, align=None):
        assert value.type == pointer.type.pointee
        size = bytes_of(value.type)
        self.write(pointer.number, self.bits(value), size, align or size)

    def gep(self, pointer, index):
        assert index[0].type == ir.IntType(64)
        return Value(pointer.type, pointer.number + signed(index[0]) * bytes_of(pointer.type.pointee))

    def bitcast(self, value, kind):
        if isinstance(kind, ir.PointerType):
            return Value(kind, value.number)
        assert bytes_of(value.type) == bytes_of(kind)
        return self.of_bits(kind, self.bits(value))

    def converted(self, value, kind):
        return Value(kind, number(value))

    ptrtoint = inttoptr = zext = trunc = addrspacecast = converted

    def sext(self, value, kind):
        return Value(kind, signed(value))

    def same(compute):
        def of_both(self, a, b):
            assert a.type == b.type
            return Value(a.type, compute(number(a), number(b)))

        return of_both

    add, mul = same(lambda a, b: a + b), same(lambda a, b: a * b)
    shl, lshr = same(lambda a, b: a << b), same(lambda a, b: a >> b)
    and_, or_ = same(lambda a, b: a & b), same(lambda a, b: a | b)
    fadd, fmul = add, mul

    def fma(self, a, b, c):
        assert a.type == b.type == c.type
        return Value(a.type, number(a) * number(b) + number(c))

    def icmp_signed(self, relation, a, b):
        assert (relation, a.type) == ("!=", b.type)
        return Value(ir.IntType(1), number(a) != number(b))

    def select(self, which, a, b):
        return a if number(which) else b

    def extract_element(self, vector, z):
        return Value(vector.type.element, vector.number[number(z)])

    def insert_element(self, vector, value, z):
        assert value.type == vector.type.element
        values = list(number(vector))
        values[number(z)] = value.number
        return Value(vector.type, values)

    # A switch: blocks that are not chosen neither read nor write.

    def append_basic_block(self, name):
        return SimpleNamespace(name=name, ended=False)

    def switch(self, case, default):
        self.chosen = default

        def add_case(constant, block):
            assert case.type == constant.type
            if number(case) == number(constant):
                self.chosen = block

        return SimpleNamespace(add_case=add_case)

    def position_at_end(self, block):
        self.runs = block is self.chosen or block.name == "after"

    def branch(self, block):
        assert block.name == "after"


def computed(intrinsic, builder, *arguments):
    """Run an intrinsic's code. ``arguments``: arrays of the builder, tuples of words, or numbers."""

    def argument(kind, given):
        if isinstance(given, tuple):
            return Value(None, [Value(ir.IntType(32), one) for one in given])
        return given if hasattr(given, "view") else Value(value_type(kind), given)

    given = [a.type if hasattr(a, "view") else types.intp for a in arguments]
    signature, code = intrinsic._defn(None, *given)
    return code(CONTEXT, builder, signature, [*map(argument, signature.args, arguments)])
