#include "gpu/nccl_collectives.h"

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

const char* function_of(Collective collective) noexcept {
  switch (collective) {
    case Collective::all_reduce: return "ncclAllReduce";
    case Collective::reduce_scatter: return "ncclReduceScatter";
    case Collective::reduce: return "ncclReduce";
    case Collective::all_gather: return "ncclAllGather";
    default: return "ncclBroadcast";
  }
}

int enqueue(const NcclApi& api, NcclComm comm, const Call& call, NcclStream stream) {
  const int type = type_of(call.dtype), op = op_of(call.dtype, call.op);
  const size_t bytes = call.count * element_size(call.dtype);
  switch (call.collective) {
    case Collective::all_reduce: return api.all_reduce(call.input, call.output, call.count, type, op, comm, stream);
    case Collective::reduce_scatter:
      return api.reduce_scatter(call.input, call.output, call.count, type, op, comm, stream);
    case Collective::reduce: return api.reduce(call.input, call.output, call.count, type, op, call.root, comm, stream);
    case Collective::all_gather: return api.all_gather(call.input, call.output, bytes, kNcclUint8, comm, stream);
    default: return api.broadcast(call.input, call.output, bytes, kNcclUint8, call.root, comm, stream);
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
  const auto act = [call, stream](const NcclApi& api, NcclComm comm) { return enqueue(api, comm, call, stream); };
  try {
    communicator_.call(function_of(call.collective), act, Deadline::after(call.timeout));
  } catch (const Error& error) {
    communicator_.abort();
    rethrow(error.kind(), last_ + " on rank " + std::to_string(communicator_.rank()) + ": " + error.what());
  }
}

}  // namespace ringlet
