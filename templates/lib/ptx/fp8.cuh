#include "lib/base.cuh"

// 8-bit floats, e4m3 without infinities: conversion to half precision, exact (sm_89).

struct e4m3 { unsigned char bits; };

// Four 8-bit floats to two registers of two 16-bit ones: elements 0 and 1 to `low`, 2 and 3 to `high`.
DEVICE void unpack_e4m3(u32 four, u32& low, u32& high) {
    asm("{\n"
        ".reg .b16 first, second;\n"
        "mov.b32 {first, second}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, first;\n"
        "cvt.rn.f16x2.e4m3x2 %1, second;\n"
        "}" : "=r"(low), "=r"(high) : "r"(four));
}
// Bytes 0, 2, 1, 3: in a transposed matrix of pairs, the first elements of two rows together, then the second ones.
DEVICE u32 part_pairs(u32 four) {
    u32 parted;
    asm("prmt.b32 %0, %1, 0, 0x3120;" : "=r"(parted) : "r"(four));
    return parted;
}
