/* Other libraries. cuBLAS, as far as torch makes its handles before an operator runs. Products of
 * matrices are the CPU's. */
#include <stddef.h>

int cublasCreate_v2(void **handle)
{
    *handle = (void *)0x77;
    return 0;
}

int cublasDestroy_v2(void *handle) { return 0; }
int cublasSetStream_v2(void *handle, void *stream) { return 0; }
int cublasSetWorkspace_v2(void *handle, void *memory, size_t bytes) { return 0; }
int cublasSetMathMode(void *handle, int mode) { return 0; }

int cublasGetMathMode(void *handle, int *mode)
{
    *mode = 0;
    return 0;
}

int cublasLtCreate(void **handle)
{
    *handle = (void *)0x78;
    return 0;
}

int cublasLtDestroy(void *handle) { return 0; }
size_t cublasLtGetVersion(void) { return 130100; }

/* NCCL: the groups that a process of one rank opens and closes at its end, with nothing in them. */
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
