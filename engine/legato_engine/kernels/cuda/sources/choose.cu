// The value of a graph's conditional node.
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                      unsigned int value);

// A launch passes its 64-bit handle as two int32.
extern "C" __global__ void choose(const int* index, int low, int high) {
  const auto handle = (cudaGraphConditionalHandle)(unsigned)high << 32 | (unsigned)low;
  if (threadIdx.x == 0) cudaGraphSetConditional(handle, *index);
}
