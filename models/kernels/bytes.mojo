"""Sums of products of bytes without a sign and bytes with one, as processors have them."""

from std.memory import bitcast
from std.sys.info import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

comptime I16 = DType.int16
comptime I32 = DType.int32
comptime U8 = DType.uint8
# Whether there is an instruction that adds four products to each of 16 sums.
comptime HAS_DOT4 = CompilationTarget.has_vnni() and CompilationTarget.has_avx512f()
# Whether instead there are ones that add two products, for 8 sums.
comptime HAS_DOT2 = not HAS_DOT4 and CompilationTarget.has_avx2()
# Sums of a register.
comptime SUMS = 8 if HAS_DOT2 else 16


@always_inline
def dot4(sums: SIMD[I32, SUMS], a: SIMD[U8, 4 * SUMS], b: Int32) -> SIMD[I32, SUMS]:
    """Adds to each sum the products of its four bytes of a with the four of b, which have a sign."""
    comptime if HAS_DOT4:
        return llvm_intrinsic[
            "llvm.x86.avx512.vpdpbusd.512", SIMD[I32, SUMS], has_side_effect=False
        ](sums, a, bitcast[DType.int8, 4 * SUMS](SIMD[I32, SUMS](b)))
    elif HAS_DOT2:
        var codes = bitcast[DType.uint16, 2 * SUMS](a)
        var values = bitcast[I16, 2 * SUMS](SIMD[I32, SUMS](b))
        var even = add_pairs(bitcast[I16, 2 * SUMS](codes & 255), (values << 8) >> 8)
        return sums + even + add_pairs(bitcast[I16, 2 * SUMS](codes >> 8), values >> 8)
    else:
        var codes = bitcast[I32, SUMS](a)
        var total = sums
        comptime for byte in range(4):
            var value = (b << Int32(24 - 8 * byte)) >> 24
            total += ((codes >> Int32(8 * byte)) & 255) * value
        return total


@always_inline
def dot2(a: SIMD[U8, 4 * SUMS], b: Int32) -> SIMD[I16, 2 * SUMS]:
    """The products of each two bytes of a with two of b, added, where 16 bits hold that."""
    return llvm_intrinsic[
        "llvm.x86.avx2.pmadd.ub.sw", SIMD[I16, 2 * SUMS], has_side_effect=False
    ](a, bitcast[DType.int8, 4 * SUMS](SIMD[I32, SUMS](b)))


@always_inline
def add_pairs(a: SIMD[I16, 2 * SUMS], b: SIMD[I16, 2 * SUMS]) -> SIMD[I32, SUMS]:
    """The products of each two of a and b, added."""
    return llvm_intrinsic["llvm.x86.avx2.pmadd.wd", SIMD[I32, SUMS], has_side_effect=False](a, b)
