#include "bindings/staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "bindings/tensors.h"

namespace ringlet {
namespace {

/// A dimension of the difference of two elements' places: `steps` from `least` to `most`, of `stride` elements each.
struct Span {
  int64_t stride, least, most;
};

using Spans = std::vector<Span>;

/// Where the tensor's elements lie, in bytes.
struct Extent {
  const std::byte *begin, *end;
};

Extent extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

/// Whether `distance` is a sum of steps along spans[i...], the largest strides first. Returns true after `tries`
/// attempts: for some layouts no method but trial is known.
bool reachable(const Spans& spans, size_t i, int64_t distance, int& tries) {
  if (--tries < 0) return true;
  if (i == spans.size()) return distance == 0;
  int64_t least = 0, most = 0;  // what the rest can add
  for (size_t k = i + 1; k < spans.size(); ++k) {
    least += spans[k].stride * spans[k].least;
    most += spans[k].stride * spans[k].most;
  }
  const auto [stride, first, last] = spans[i];
  const auto floor = [](int64_t a, int64_t b) { return a / b - (a % b != 0 && a < 0); };
  const int64_t from = std::max(first, -floor(most - distance, stride)),
                to = std::min(last, floor(distance - least, stride));
  for (int64_t step = from; step <= to; ++step) {
    if (reachable(spans, i + 1, distance - step * stride, tries)) return true;
  }
  return false;
}

constexpr int kTries = 1000;

void add_spans(Spans& spans, const at::Tensor& tensor, bool forward, bool backward) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const int64_t most = tensor.size(d) - 1;
    if (most > 0) spans.push_back({tensor.stride(d), backward ? -most : 0, forward ? most : 0});
  }
}

void sort(Spans& spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.stride > b.stride; });
}

/// Whether two tensors, whose extents overlap, may have elements that share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  const int64_t size = static_cast<int64_t>(a.itemsize());
  const int64_t bytes =
      static_cast<const std::byte*>(b.const_data_ptr()) - static_cast<const std::byte*>(a.const_data_ptr());
  if (bytes % size != 0 || a.itemsize() != b.itemsize()) return true;
  Spans spans;
  add_spans(spans, a, /*forward=*/true, /*backward=*/false);
  add_spans(spans, b, /*forward=*/false, /*backward=*/true);
  sort(spans);
  int tries = kTries;
  return reachable(spans, 0, bytes / size, tries);
}

/// Whether two elements of the tensor may share memory.
bool meets_itself(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return false;
  Spans spans;
  add_spans(spans, tensor, /*forward=*/true, /*backward=*/false);
  sort(spans);
  // Each stride is larger than all that smaller ones reach.
  int64_t reach = 0;
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    if (span->stride <= reach) return true;
    reach += span->stride * span->most;
  }
  return false;
}

/// A contiguous tensor, on the host of registered memory.
at::Tensor room_for(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return empty_registered(tensor.sizes(), tensor.scalar_type());
  return at::empty(tensor.sizes(), tensor.options(), c10::MemoryFormat::Contiguous);
}

}  // namespace

at::Tensor Staging::readable(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  at::Tensor copy = room_for(tensor);
  collected_.emplace_back(tensor, copy);
  return copy;
}

at::Tensor Staging::writable(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  at::Tensor room = room_for(tensor);
  delivered_.emplace_back(room, tensor);
  return room;
}

at::Tensor Staging::in_place(const at::Tensor& tensor) {
  at::Tensor copy = readable(tensor);
  if (!copy.is_same(tensor)) delivered_.emplace_back(copy, tensor);
  return copy;
}

std::vector<at::Tensor> Staging::originals() const {
  std::vector<at::Tensor> tensors;
  for (const auto& [from, to] : collected_) tensors.push_back(from);
  for (const auto& [from, to] : delivered_) tensors.push_back(to);
  return tensors;
}

void Staging::collect() const {
  const at::NoGradGuard no_grad;
  for (const auto& [from, to] : collected_) to.copy_(from);
}

void Staging::deliver() const {
  const at::NoGradGuard no_grad;
  for (const auto& [from, to] : delivered_) to.copy_(from);
}

void check_apart(const std::vector<at::Tensor>& outputs, const char* call) {
  struct Placed {
    const at::Tensor* tensor;
    Extent extent;
  };
  std::vector<Placed> placed;
  for (const at::Tensor& output : outputs) {
    if (output.numel() == 0) continue;
    // torch would refuse the copy back when the call is complete on the other ranks.
    if (!output.is_contiguous() && output.is_inference() && !c10::InferenceMode::is_enabled()) {
      throw InvalidUsage(std::string(call) +
                         ": an output tensor that is not contiguous was made in inference mode, and can be written "
                         "only there: make the call in torch.inference_mode(), or pass a clone");
    }
    if (meets_itself(output)) {
      throw InvalidUsage(std::string(call) +
                         ": elements of an output tensor share memory (it is expanded, or its strides "
                         "overlap): pass one with memory for each element, and copy the result from it");
    }
    placed.push_back({&output, extent_of(output)});
  }
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.extent.begin < b.extent.begin; });
  for (size_t i = 0; i < placed.size(); ++i) {
    for (size_t j = i + 1; j < placed.size() && placed[j].extent.begin < placed[i].extent.end; ++j) {
      if (!overlap(*placed[i].tensor, *placed[j].tensor)) continue;
      throw InvalidUsage(std::string(call) + ": output tensors must not overlap: give each its own memory");
    }
  }
}

}  // namespace ringlet
