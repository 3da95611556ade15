// The row kernels for CPUs with avx2.
#define SWITCHYARD_ISA avx2
#include "device/cpu/row_kernels.inl"
