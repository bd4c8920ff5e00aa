// The bytes that a kernel moves in a second, in times of those that the device's own copy does: medians of paired
// ratios.
//
// Data are random, since memory of zeros is faster than memory of data; results are looked at in some places.
#include <memory>

#include "device_memory.h"

using namespace reduce_reference;

namespace gpu_check {
namespace {

constexpr size_t kBlock = (size_t{4} << 20) + 48;  // of random bytes, repeated
constexpr size_t kWindow = size_t{64} << 10;       // of a result that is looked at

struct Row {
  std::string name;
  double moved;  // bytes read and written, in times of a copied buffer's length
  std::function<int()> enqueue;
  size_t result_bytes;
  std::function<Bytes(size_t at, size_t bytes)> wanted;  // of the result
};

class Bandwidth {
 public:
  explicit Bandwidth(const Options& options)
      : bytes_(size_t{options.few ? 8u : 256u} << 20), calls_(options.few ? 2 : 20), rounds_(options.few ? 3 : 9) {
    std::mt19937_64 random(5);
    for (int i = 0; i < 3; ++i) {
      blocks_.push_back(random_bytes(kBlock, random));
      sources_.push_back(std::make_unique<Memory>(bytes_));
      repeat(*sources_.back(), blocks_.back(), stream_);
    }
    result_ = std::make_unique<Memory>(bytes_);
  }

  Row sum(DType dtype, int n, const std::string& number) {
    ReduceArgs args{.dst = result_->data(), .srcs = nullptr, .n = n, .count = bytes_ / element_size(dtype)};
    const auto enqueue = [this, args, dtype]() mutable {
      const std::byte* srcs[] = {sources_[0]->data(), sources_[1]->data(), sources_[2]->data()};
      args.srcs = srcs;
      return device().reduce(&args, dtype, ReduceOp::sum, stream_.get());
    };
    const auto wanted = [this, dtype, n](size_t at, size_t bytes) {
      std::vector<Bytes> parts;
      for (int i = 0; i < n; ++i) parts.push_back(repeated(blocks_[static_cast<size_t>(i)], at, bytes));
      return reference(dtype, ReduceOp::sum, parts, {});
    };
    return {"sum of " + number + " of " + name(dtype) + size(), n + 1.0, enqueue, bytes_, wanted};
  }

  /// `copy_name`: of the copy's own line; null for none.
  void measure(const Row& row, const char* copy_name) {
    Section section(row.name);
    section.attempt("result", [&] { return first_result(row); });
    std::vector<double> copies, ratios;
    for (int round = 0; round < rounds_; ++round) {
      const double copy =
          time([&] { return device().copy(result_->data(), sources_[0]->data(), bytes_, stream_.get()); });
      ratios.push_back(row.moved / 2 * copy / time(row.enqueue));
      copies.push_back(2.0 * static_cast<double>(bytes_) / copy / 1e9);
    }
    if (copy_name != nullptr) tell(copy_name + size(), median(copies), "GB/s");
    tell(row.name, median(ratios), "of the copy's bandwidth");
  }

 private:
  std::string size() const { return ", " + std::to_string(bytes_ >> 20) + " MiB"; }

  std::string first_result(const Row& row) {
    repeat(*result_, Bytes(size_t{1} << 20, std::byte{0xa5}), stream_);
    ok(row.enqueue(), "launching");
    stream_.wait();
    for (const size_t at : {size_t{0}, row.result_bytes / 2, row.result_bytes - kWindow}) {
      const std::string wrong = difference(result_->read(at, kWindow).data(), row.wanted(at, kWindow).data(), kWindow);
      if (!wrong.empty()) return "from byte " + std::to_string(at) + ": " + wrong;
    }
    return "";
  }

  double time(const std::function<int()>& enqueue) {
    ok(enqueue(), "launching");
    stream_.wait();
    return seconds([&] {
             for (int i = 0; i < calls_; ++i) ok(enqueue(), "launching");
             stream_.wait();
           }) /
           calls_;
  }

  const size_t bytes_;
  const int calls_, rounds_;
  Stream stream_;
  std::vector<Bytes> blocks_;
  std::vector<std::unique_ptr<Memory>> sources_;
  std::unique_ptr<Memory> result_;
};

}  // namespace

void bandwidth(const Options& options) {
  attempt("bandwidth", [&] {
    Bandwidth bandwidth(options);
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const std::string copy = std::string("copy of ") + name(dtype);
      attempt("sum of two", [&] { bandwidth.measure(bandwidth.sum(dtype, 2, "two"), copy.c_str()); });
    }
    attempt("sum of three", [&] { bandwidth.measure(bandwidth.sum(DType::float32, 3, "three"), nullptr); });
  });
}

}  // namespace gpu_check
