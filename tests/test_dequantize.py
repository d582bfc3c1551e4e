"""Every code of every weight type at every place of an atom, through the host build of the device dequantizer.

The packed layout is stated here a second time, from the PTX manual's fragment of `mma.m16n8k16` and plain lists of bit
positions, with nothing taken from layout/packed_atom.hpp.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from humming_cutlass import _C, dtypes, errors, layout, support
from humming_cutlass.config import TypeConfig

OPERANDS: dict[str, npt.DTypeLike] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

#: Types that another library has.
ORACLES: dict[str, npt.DTypeLike] = {
    "float4_e2m1": ml_dtypes.float4_e2m1fn,
    "float6_e2m3": ml_dtypes.float6_e2m3fn,
    "float6_e3m2": ml_dtypes.float6_e3m2fn,
    "float8_e3m4": ml_dtypes.float8_e3m4,  # with infinities and NaN at the top exponent, where ours has numbers
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0": ml_dtypes.float8_e8m0fnu,
    "int2": ml_dtypes.int2,
    "int4": ml_dtypes.int4,
    "int8": np.int8,
    "uint2": ml_dtypes.uint2,
    "uint4": ml_dtypes.uint4,
    "uint8": np.uint8,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
# Since ml_dtypes 0.6.
ORACLES |= {name: getattr(ml_dtypes, name) for name in ("int1", "uint1") if hasattr(ml_dtypes, name)}


def _oracle(name: str) -> npt.NDArray[np.float64]:
    """The value of every code, by `ml_dtypes` or numpy."""
    bits = dtypes.parse(name).bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return codes.view(ORACLES[name]).astype(np.float64)


def _admitted(element_a: str) -> list[str]:
    return [name for name in dtypes.WEIGHT_TYPES if support.represents(element_a, name)]


PAIRS = [(b, a) for a in OPERANDS for b in _admitted(a)]


def _every_code_everywhere(element_b: str) -> npt.NDArray[np.uint8]:
    """Finite codes (atoms, 16, 64): each stands at each place of some atom, between neighbours without a pattern."""
    finite = np.flatnonzero(np.isfinite(dtypes.parse(element_b).values())).astype(np.uint8)
    start = np.random.default_rng(5).integers(finite.size, size=(16, 64))
    return finite[(start + np.arange(finite.size)[:, None, None]) % finite.size]


def _convert(codes: npt.NDArray[np.uint8], element_b: str, element_a: str, **folded: float) -> npt.NDArray[np.float64]:
    """Codes (atoms, 16, 64) packed and converted as in a kernel; float64, the exponent taken out."""
    packed = _C.pack_codes(codes.reshape(-1, 64), element_b)
    words = 32 * dtypes.parse(element_b).bits
    assert packed.shape == (len(codes), 1, words)
    operands, exponent = _C.convert_atoms(packed.reshape(-1, words), element_b, element_a, **folded)
    assert operands.shape == codes.shape
    assert operands.dtype == np.uint16
    return np.ldexp(operands.view(OPERANDS[element_a]).astype(np.float64), -exponent)


def _expected_values(element_b: str, element_a: str) -> npt.NDArray[np.float64]:
    values = dtypes.parse(element_b).values()
    if dtypes.parse(element_b).kind is dtypes.Kind.CODE_BOOK:
        return values.astype(OPERANDS[element_a]).astype(np.float64)
    return values


def test_what_is_covered() -> None:
    """8 integers of each kind, the floats of 2 to 8 bits, the code book; with float16 all but those of X > 5."""
    floats = [(x, y) for x, y in itertools.product(range(1, 8), range(7)) if 1 + x + y <= 8]
    assert len(dtypes.WEIGHT_TYPES) == 16 + len(floats) + 1
    assert len(_admitted("bfloat16")) == len(dtypes.WEIGHT_TYPES)
    assert len(_admitted("float16")) == len(dtypes.WEIGHT_TYPES) - sum(x > 5 for x, _ in floats)


@pytest.mark.parametrize(("element_b", "element_a"), PAIRS)
def test_every_code_at_every_place_is_exact(element_b: str, element_a: str) -> None:
    codes = _every_code_everywhere(element_b)
    for place in ((0, 0), (15, 63), (8, 17)):
        assert set(codes[(slice(None), *place)]) == set(codes.ravel())
    expected = _expected_values(element_b, element_a)[codes]
    got = _convert(codes, element_b, element_a)
    wrong = np.argwhere((got != expected) | (np.signbit(got) != np.signbit(expected)))
    assert wrong.size == 0, f"{len(wrong)} wrong, first at {wrong[0]}: {got[tuple(wrong[0])]}"


def _folded_scales(element_b: str, element_a: str) -> list[float]:
    """Scales exact in the operand type, from one end of the admitted range to the other."""
    types = TypeConfig(
        element_a=element_a, element_b=element_b, element_d=element_a, element_scale=element_a, group_size=32
    )
    least, greatest = support.scale_range(types)
    wanted = [least, least * 1.37, 2.0**-9 * 1.71, 0.0371, 0.25, -1.0, greatest / 2 * 1.99]
    rounded = np.array(wanted).astype(OPERANDS[element_a]).astype(np.float64)
    return [float(x) for x in rounded if least <= abs(x) < greatest]


@pytest.mark.parametrize(("element_b", "element_a"), PAIRS)
def test_folded_scales_round_once(element_b: str, element_a: str) -> None:
    """(value - zero) * scale, fused into the conversion or multiplied after it, is the exact product rounded once."""
    codes = _every_code_everywhere(element_b)[:2]
    values = _expected_values(element_b, element_a)[codes]
    unsigned = dtypes.parse(element_b).kind is dtypes.Kind.UINT
    top = 1 << dtypes.parse(element_b).bits
    scales = _folded_scales(element_b, element_a)
    # Floats with float16's own five exponent bits leave no room for a scale: the SM80 mainloop computes them.
    assert len(scales) >= 3 or (element_a == "float16" and dtypes.parse(element_b).exponent_bits == 5)
    for scale in scales:
        for zero in (None, 0, 1, top // 2, top - 1, top) if unsigned else (None,):
            folded = {"scale": scale} if zero is None else {"scale": scale, "zero": float(zero)}
            got = _convert(codes, element_b, element_a, **folded)
            exact = (values - (zero or 0)) * scale
            ok = np.isfinite(exact)
            unit = 2.0 ** -(11 if element_a == "float16" else 8)
            assert (np.abs(got - exact)[ok] <= unit * np.abs(exact)[ok]).all(), (scale, zero)
            assert (got[ok & (exact == 0)] == 0).all()


@pytest.mark.parametrize(("element_b", "element_a"), [(b, a) for b, a in PAIRS if b in ORACLES])
def test_every_code_against_ml_dtypes(element_b: str, element_a: str) -> None:
    codes = _every_code_everywhere(element_b)
    expected = _oracle(element_b)[codes]
    known = np.isfinite(expected)
    assert known.mean() > 0.8
    np.testing.assert_array_equal(_convert(codes, element_b, element_a)[known], expected[known])


@pytest.mark.parametrize("name", ORACLES)
def test_values_against_ml_dtypes(name: str) -> None:
    ours, theirs = dtypes.parse(name).values(), _oracle(name)
    if name == "float8_e3m4":  # all codes are numbers here
        assert np.isfinite(ours).all()
        ours = np.where(np.isfinite(theirs), ours, theirs)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(theirs)]))


def test_values_of_floats_by_hand() -> None:
    """Types that no library has, value by value."""
    assert dtypes.parse("float3_e1m1").values().tolist() == [0, 1, 2, 3, 0, -1, -2, -3]
    assert dtypes.parse("float3_e2m0").values().tolist() == [0, 1, 2, 4, 0, -1, -2, -4]
    assert dtypes.parse("float2_e1m0").values().tolist() == [0, 2, 0, -2]
    e5m1 = dtypes.parse("float7_e5m1").values()
    assert e5m1[:4].tolist() == [0, 2.0**-15, 2.0**-14, 1.5 * 2.0**-14]
    assert e5m1[63] == 1.5 * 2.0**16
    assert dtypes.parse("float8_e7m0").values()[127] == 2.0 ** (127 - 63)
    assert dtypes.parse("int3").values().tolist() == [0, 1, 2, 3, -4, -3, -2, -1]
    assert dtypes.parse("int1").values().tolist() == [0, -1]
    assert dtypes.parse("uint3").values().tolist() == list(range(8))


@pytest.mark.parametrize("element_a", OPERANDS)
def test_nf4_is_its_code_book_rounded_once(element_a: str) -> None:
    book = np.array(dtypes.NF4_CODE_BOOK)
    # Dettmers et al.: sorted, 0 exact, both ends 1.
    assert (np.diff(book) > 0).all()
    assert (book[0], book[7], book[15]) == (-1.0, 0.0, 1.0)
    codes = np.tile(np.arange(16, dtype=np.uint8), 64).reshape(1, 16, 64)
    got = _convert(codes, "nf4", element_a).ravel()[:16]
    digits = {"float16": 11, "bfloat16": 8}[element_a]
    for value, rounded in zip(book, got, strict=True):
        step = 2.0 ** (np.frexp(value)[1] - digits) if value else 1.0
        assert rounded == np.round(value / step) * step


@pytest.mark.parametrize("element_b", ["float8_e6m1", "float8_e7m0", "float7_e6m0"])
def test_what_the_operand_cannot_hold_is_refused(element_b: str) -> None:
    packed = _C.pack_codes(np.zeros((16, 64), np.uint8), element_b)
    with pytest.raises(ValueError, match=f"dtype: got {element_b}"):
        _C.convert_atoms(packed.reshape(1, -1), element_b, "float16")


@pytest.mark.parametrize("element_b", ["float8_e4m3", "float8_e5m2"])
def test_codes_that_are_not_finite_are_refused(element_b: str) -> None:
    types = TypeConfig(element_a="float16", element_b=element_b, element_d="float16", element_scale="float16")
    values = dtypes.parse(element_b).values()
    scale = np.ones((16, 1), np.float16)
    refused = {"float8_e4m3": 2, "float8_e5m2": 8}[element_b]
    assert np.count_nonzero(~np.isfinite(values)) == refused
    for code in range(256):
        codes = np.zeros((16, 64), np.uint8)
        codes[3, 5] = code
        if np.isfinite(values[code]):
            layout.pack(codes, scale, types=types)
        else:
            with pytest.raises(errors.ArgumentError, match=rf"codes: got 0x{code:02X} \(not finite\) at \(3, 5\)"):
                layout.pack(codes, scale, types=types)


# --- The packed layout, a second time ---------------------------------------------------------------------------------


def _fragment(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of element a_i, 0 <= i < 8, of operand A of mma.m16n8k16; PTX ISA, "Matrix Fragments"."""
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    column = thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    return row, column


def _bit_order(bits: int) -> list[tuple[int, int]]:
    """(word, bit) of each of the 16 * bits bits of a 16-bit half-column: whole fields first, then what they leave."""
    whole = 16 // bits * bits
    fields = [(word, bit) for word in range(bits) for bit in range(whole)]
    return fields + [(word, bit) for word in range(bits) for bit in range(whole, 16)]


def _packed_by_hand(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """The words of one atom, from codes (16, 64)."""
    order = _bit_order(bits)
    vector = next(v for v in (4, 2, 1) if bits % v == 0)
    atom = [0] * (32 * bits)
    for lane, k_step, i in itertools.product(range(32), range(4), range(8)):
        row, column = _fragment(lane, i)
        code = int(codes[row, 16 * k_step + column])
        field, half = 4 * k_step + i // 2, i % 2  # a register holds elements 2 r (low half) and 2 r + 1
        for j, (word, bit) in enumerate(order[field * bits : (field + 1) * bits]):
            # Lanes read `vector` words at once, one lane after the other.
            index = word // vector * 32 * vector + lane * vector + word % vector
            atom[index] |= (code >> j & 1) << (bit + 16 * half)
    return np.array(atom, dtype=np.uint32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_layout(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(1 << bits, size=(16, 64)).astype(np.uint8)
    atom = _packed_by_hand(codes, bits)
    assert atom.nbytes == 128 * bits
    np.testing.assert_array_equal(_C.pack_codes(codes, f"uint{bits}").reshape(-1), atom)
    if bits > 1:
        np.testing.assert_array_equal(_C.pack_codes(codes, f"float{bits}_e1m{bits - 2}").reshape(-1), atom)
    # Two's complement lies there with its sign bit flipped: unsigned.
    flipped = codes ^ np.uint8(1 << (bits - 1))
    np.testing.assert_array_equal(_C.pack_codes(flipped, f"int{bits}").reshape(-1), atom)


@pytest.mark.parametrize(("bits", "word", "shift"), [(4, 2, 8), (8, 5, 0)])
def test_one_weight_by_hand(bits: int, word: int, shift: int) -> None:
    """Lane 6, k step 2, register 2, upper half: row 1, column 2 * 16 + 2 * 2 + 1 + 8 = 45; field 10."""
    codes = np.zeros((16, 64), np.uint8)
    codes[1, 45] = (1 << bits) - 1
    data = _C.pack_codes(codes, f"uint{bits}").reshape(bits // 4, 32, 4)  # 16 bytes a lane
    (at,) = np.argwhere(data)
    assert at.tolist() == [word // 4, 6, word % 4]
    assert data[tuple(at)] == ((1 << bits) - 1) << (16 + shift)


def test_atoms_along_k_are_contiguous() -> None:
    codes = np.random.default_rng(0).integers(8, size=(48, 192)).astype(np.uint8)
    packed = _C.pack_codes(codes, "uint3")
    assert packed.shape == (3, 3, 96)
    for i, j in itertools.product(range(3), range(3)):
        atom = codes[16 * i : 16 * i + 16, 64 * j : 64 * j + 64]
        np.testing.assert_array_equal(packed[i, j], _packed_by_hand(atom, 3))
