#include "gpu/nccl_collectives.h"

#include <utility>

#include "schedule/registry.h"

namespace ringlet {
namespace {

constexpr int kNone = -1;

/// ncclDataType_t
int type_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::int8: return 0;
    case DType::uint8: return 1;
    case DType::int32: return 2;
    case DType::int64: return 4;
    case DType::float16: return 6;
    case DType::float32: return 7;
    case DType::float64: return 8;
    case DType::bfloat16: return 9;
    default: return kNone;
  }
}

bool is_float(DType dtype) noexcept { return type_of(dtype) >= type_of(DType::float16); }

/// ncclRedOp_t, for a dtype that NCCL has.
int op_of(DType dtype, ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::sum: return 0;
    case ReduceOp::product: return 1;
    case ReduceOp::max: return is_float(dtype) ? kNone : 2;
    case ReduceOp::min: return is_float(dtype) ? kNone : 3;
    case ReduceOp::avg: return is_float(dtype) ? 4 : kNone;
    default: return kNone;
  }
}

struct Function {
  const char* name;
  NcclCommunicator::Act act;
};

Function function_of(const Call& call, NcclStream stream) {
  const std::byte* from = call.input;
  std::byte* to = call.output;
  const int type = type_of(call.dtype), op = op_of(call.dtype, call.op), root = call.root;
  const size_t count = call.count, bytes = count * element_size(call.dtype);
  switch (call.collective) {
    case Collective::all_reduce:
      return {"ncclAllReduce", [=](const NcclApi& api, NcclComm comm) {
                return api.all_reduce(from, to, count, type, op, comm, stream);
              }};
    case Collective::reduce_scatter:
      return {"ncclReduceScatter", [=](const NcclApi& api, NcclComm comm) {
                return api.reduce_scatter(from, to, count, type, op, comm, stream);
              }};
    case Collective::reduce:
      return {"ncclReduce", [=](const NcclApi& api, NcclComm comm) {
                return api.reduce(from, to, count, type, op, root, comm, stream);
              }};
    case Collective::all_gather:
      return {"ncclAllGather", [=](const NcclApi& api, NcclComm comm) {
                return api.all_gather(from, to, bytes, kNcclUint8, comm, stream);
              }};
    default:
      return {"ncclBroadcast", [=](const NcclApi& api, NcclComm comm) {
                return api.broadcast(from, to, bytes, kNcclUint8, root, comm, stream);
              }};
  }
}

}  // namespace

bool NcclCollectives::serves(const Call& call) noexcept {
  if (call.blocks != nullptr || nccls_own(call.collective) == nullptr) return false;
  if (!is_reduction(call.collective)) return true;
  return type_of(call.dtype) != kNone && op_of(call.dtype, call.op) != kNone;
}

void NcclCollectives::run(const Call& call, NcclStream stream) {
  if (!serves(call)) {
    throw InvalidUsage(describe(call) +
                       " on a GPU: NCCL has no such collective of its own, or one that treats NaNs "
                       "otherwise; choose another algorithm, or auto");
  }
  communicator_.check();
  last_ = describe(call);
  if (call.count == 0) return;
  Function function = function_of(call, stream);
  try {
    communicator_.call(function.name, std::move(function.act), Deadline::after(call.timeout));
  } catch (const Error& error) {
    communicator_.abort();
    rethrow(error.kind(), last_ + " on rank " + std::to_string(communicator_.rank()) + ": " + error.what());
  }
}

}  // namespace ringlet
