class CudaKernels: pass
