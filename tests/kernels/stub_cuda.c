/* A libcuda.so.1 that launches nothing: it keeps what the last launch was told, in the types of cuda.h. */
#include "cuda.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static char text[1 << 16];
static size_t used;
static int sizes[128], num_sizes;

static void note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  used += vsnprintf(text + used, sizeof(text) - used, format, arguments);
  va_end(arguments);
}

static void note_bytes(const void *data, int size) {
  for (int i = 0; i < size; ++i)
    note("%02x", ((const unsigned char *)data)[i]);
}

/* For the test: sizes of the next launch's parameters; forgets what was kept. */
void stub_expect(int count, const int *values) {
  num_sizes = count;
  memcpy(sizes, values, count * sizeof(int));
  used = 0;
  text[0] = 0;
}

const char *stub_text(void) { return text; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  note("grid %u %u %u block %u %u %u shared %u stream %p extra %d\n", config->gridDimX, config->gridDimY,
       config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ, config->sharedMemBytes,
       (void *)config->hStream, extra != 0);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    note("attribute %d ", config->attrs[i].id);
    note_bytes(&config->attrs[i].value, 64);
    note("\n");
  }
  for (int i = 0; i < num_sizes; ++i) {
    note("parameter %d: ", i);
    note_bytes(params[i], sizes[i]);
    note("\n");
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  size_t start = used;
  note("map type %d rank %u base %p interleave %d swizzle %d promotion %d fill %d aligned %d", type, rank, base,
       interleave, swizzle, promotion, fill, (int)((size_t)map % 64 == 0));
  for (unsigned i = 0; i < rank; ++i)
    note(" dim %llu box %u step %u", (unsigned long long)dims[i], box[i], steps[i]);
  for (unsigned i = 0; i + 1 < rank; ++i)
    note(" stride %llu", (unsigned long long)strides[i]);
  note("\n");
  unsigned long long hash = 1469598103934665603ull;
  for (size_t i = start; i < used; ++i)
    hash = (hash ^ (unsigned char)text[i]) * 1099511628211ull;
  for (int i = 0; i < 16; ++i)
    map->opaque[i] = hash * (i + 1);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1024;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
  note("function attribute %d %d\n", attribute, value);
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) {
  note("cache %d\n", config);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  note("function %s\n", name);
  *f = (CUfunction)16;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)16;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)16;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **found) {
  *found = "stub";
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction f, const CUlaunchConfig *config) { return CUDA_SUCCESS; }
