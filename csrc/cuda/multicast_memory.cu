// Multicast objects, by the driver's own functions, which are found at run time: a driver need not have them.
#include <cuda.h>

#include "cuda/multicast.cuh"

namespace ringlet::cuda {

// As multicast.cu's instructions.
#if CUDART_VERSION >= 12020

namespace {

constexpr auto kHandle = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr int kVersion = 12010;  // the first with all of these functions

/// One of the driver's functions, by its type.
template <class Function>
bool find(const char* name, Function** function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state{};
#if CUDART_VERSION >= 12050
  const cudaError_t refused = cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &state);
#else
  const cudaError_t refused = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &state);
#endif
  *function = reinterpret_cast<Function*>(found);
  return refused == cudaSuccess && state == cudaDriverEntryPointSuccess && found != nullptr;
}

struct Driver {
  decltype(cuDeviceGet)* device_of;
  decltype(cuDeviceGetAttribute)* attribute;
  decltype(cuMulticastCreate)* create;
  decltype(cuMulticastGetGranularity)* granularity;
  decltype(cuMulticastAddDevice)* add_device;
  decltype(cuMulticastBindMem)* bind;
  decltype(cuMemGetAllocationGranularity)* memory_granularity;
  decltype(cuMemCreate)* allocate;
  decltype(cuMemRelease)* release;
  decltype(cuMemExportToShareableHandle)* share;
  decltype(cuMemImportFromShareableHandle)* open;
  decltype(cuMemAddressReserve)* reserve;
  decltype(cuMemAddressFree)* unreserve;
  decltype(cuMemMap)* map;
  decltype(cuMemUnmap)* unmap;
  decltype(cuMemSetAccess)* allow;
  bool whole;

  Driver()
      : whole(find("cuDeviceGet", &device_of) && find("cuDeviceGetAttribute", &attribute) &&
              find("cuMulticastCreate", &create) && find("cuMulticastGetGranularity", &granularity) &&
              find("cuMulticastAddDevice", &add_device) && find("cuMulticastBindMem", &bind) &&
              find("cuMemGetAllocationGranularity", &memory_granularity) && find("cuMemCreate", &allocate) &&
              find("cuMemRelease", &release) && find("cuMemExportToShareableHandle", &share) &&
              find("cuMemImportFromShareableHandle", &open) && find("cuMemAddressReserve", &reserve) &&
              find("cuMemAddressFree", &unreserve) && find("cuMemMap", &map) && find("cuMemUnmap", &unmap) &&
              find("cuMemSetAccess", &allow)) {}
};

const Driver& driver() {
  static const Driver found;
  return found;
}

/// The driver's codes are the runtime's, as far as both have one.
int code(CUresult result) { return static_cast<int>(result); }

int current_device(CUdevice* device) {
  int number = 0;
  if (const cudaError_t refused = cudaGetDevice(&number); refused != cudaSuccess) return refused;
  return code(driver().device_of(device, number));
}

CUmemAllocationProp memory_of(int number) {
  CUmemAllocationProp memory{};
  memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory.location.id = number;
  memory.requestedHandleTypes = kHandle;
  return memory;
}

/// Of an object for these bytes of each device, rounded up to what both the object and the memory must have.
int describe(RingletCudaMulticast* multicast, CUmulticastObjectProp* object) {
  int number = 0;
  if (const cudaError_t refused = cudaGetDevice(&number); refused != cudaSuccess) return refused;
  *object = {static_cast<unsigned>(multicast->devices), multicast->bytes, kHandle, 0};
  const CUmemAllocationProp memory = memory_of(number);
  size_t of_object = 0, of_memory = 0;
  CUresult refused = driver().granularity(&of_object, object, CU_MULTICAST_GRANULARITY_MINIMUM);
  if (refused == CUDA_SUCCESS) {
    refused = driver().memory_granularity(&of_memory, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  }
  if (refused != CUDA_SUCCESS) return code(refused);
  const size_t unit = of_object > of_memory ? of_object : of_memory;
  multicast->bytes = (multicast->bytes + unit - 1) / unit * unit;
  object->size = multicast->bytes;
  return 0;
}

int map_at(RingletCudaMulticast* multicast, CUmemGenericAllocationHandle handle, int number, void** at) {
  CUdeviceptr address = 0;
  const size_t bytes = multicast->bytes;
  CUresult refused = driver().reserve(&address, bytes, 0, 0, 0);
  if (refused != CUDA_SUCCESS) return code(refused);
  refused = driver().map(address, bytes, 0, handle, 0);
  if (refused != CUDA_SUCCESS) return driver().unreserve(address, bytes), code(refused);
  *at = reinterpret_cast<void*>(address);
  CUmemAccessDesc access{};
  access.location = memory_of(number).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return code(driver().allow(address, bytes, &access, 1));
}

int unmap(void* at, size_t bytes) {
  if (at == nullptr) return 0;
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  const CUresult refused = driver().unmap(address, bytes);
  return code(refused != CUDA_SUCCESS ? refused : driver().unreserve(address, bytes));
}

}  // namespace

int has_multicast(int device) {
  int answer = 0;
  CUdevice of{};
  if (!driver().whole || driver().device_of(&of, device) != CUDA_SUCCESS) return 0;
  const CUresult refused = driver().attribute(&answer, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, of);
  return refused == CUDA_SUCCESS && answer != 0;
}

int make_multicast(RingletCudaMulticast* multicast, int* descriptor) {
  if (!driver().whole) return cudaErrorNotSupported;
  CUmulticastObjectProp object{};
  if (const int refused = describe(multicast, &object); refused != 0) return refused;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult refused = driver().create(&handle, &object);
  if (refused != CUDA_SUCCESS) return code(refused);
  multicast->object = handle;
  return code(driver().share(descriptor, handle, kHandle, 0));
}

int take_multicast(RingletCudaMulticast* multicast, int descriptor) {
  if (!driver().whole) return cudaErrorNotSupported;
  CUmulticastObjectProp object{};
  if (const int refused = describe(multicast, &object); refused != 0) return refused;
  CUmemGenericAllocationHandle handle = 0;
  void* const given = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  const CUresult refused = driver().open(&handle, given, kHandle);
  if (refused == CUDA_SUCCESS) multicast->object = handle;
  return code(refused);
}

int join_multicast(RingletCudaMulticast* multicast) {
  CUdevice device{};
  const int refused = current_device(&device);
  return refused != 0 ? refused : code(driver().add_device(multicast->object, device));
}

int map_multicast(RingletCudaMulticast* multicast) {
  int number = 0;
  if (const cudaError_t refused = cudaGetDevice(&number); refused != cudaSuccess) return refused;
  const CUmemAllocationProp memory = memory_of(number);
  CUmemGenericAllocationHandle handle = 0;
  CUresult refused = driver().allocate(&handle, multicast->bytes, &memory, 0);
  if (refused != CUDA_SUCCESS) return code(refused);
  multicast->memory = handle;
  refused = driver().bind(multicast->object, 0, handle, 0, multicast->bytes, 0);
  if (refused != CUDA_SUCCESS) return code(refused);
  const int unmapped = map_at(multicast, handle, number, &multicast->own);
  return unmapped != 0 ? unmapped : map_at(multicast, multicast->object, number, &multicast->all);
}

/// The object and what is bound to it last as long as some rank has the object.
int release_multicast(RingletCudaMulticast* multicast) {
  int first = unmap(multicast->all, multicast->bytes);
  const auto note = [&](int refused) { first = first != 0 ? first : refused; };
  note(unmap(multicast->own, multicast->bytes));
  if (multicast->memory != 0) note(code(driver().release(multicast->memory)));
  if (multicast->object != 0) note(code(driver().release(multicast->object)));
  multicast->object = multicast->memory = 0;
  multicast->all = multicast->own = nullptr;
  return first;
}

#else

int has_multicast(int) { return 0; }
int make_multicast(RingletCudaMulticast*, int*) { return cudaErrorNotSupported; }
int take_multicast(RingletCudaMulticast*, int) { return cudaErrorNotSupported; }
int join_multicast(RingletCudaMulticast*) { return cudaErrorNotSupported; }
int map_multicast(RingletCudaMulticast*) { return cudaErrorNotSupported; }
int release_multicast(RingletCudaMulticast*) { return 0; }

#endif

}  // namespace ringlet::cuda
