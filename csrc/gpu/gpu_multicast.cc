#include "gpu/gpu_multicast.h"

#include <algorithm>

#include "base/partition.h"
#include "cuda/multicast.h"
#include "gpu/check_device.h"

namespace ringlet {
namespace {

constexpr size_t kLeastBytes = size_t{4} << 10;  // of a piece, if the message has as much

}  // namespace

bool GpuMulticast::serves(const Call& call) const {
  const bool sum = call.collective == Collective::all_reduce && call.op == ReduceOp::sum;
  const bool type = call.dtype == DType::float32 || call.dtype == DType::float16 || call.dtype == DType::bfloat16;
  return sum && type && call.algorithm == nullptr && call.blocks == nullptr && call.count > 0 &&
         !inside_.chooses_low_latency(call);
}

void GpuMulticast::run(const Call& call, void* stream) {
  cuda::MulticastArgs args{};
  inside_.begin(call, args);
  args.all = memory_.all;
  args.own = memory_.own;
  args.input = call.input;
  args.output = call.output;
  args.bytes = call.count * element_size(call.dtype);
  const auto blocks = static_cast<size_t>(args.blocks);
  const size_t most = memory_.bytes / blocks / cuda::kPackBytes * cuda::kPackBytes;
  const size_t share = round_up(ceil_div(args.bytes, blocks), cuda::kPackBytes);
  args.width = std::min(most, std::max(share, kLeastBytes));
  args.pieces = ceil_div(args.bytes, args.width);
  args.blocks = static_cast<int>(std::min(blocks, args.pieces));
  check_device(device_, device_.multicast(&args, call.dtype, stream), "launching a multicast kernel");
}

}  // namespace ringlet
