// What every engine must do, against plain loops: all algorithms, several worlds and counts, in and out of place.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "check.h"
#include "engine/selector.h"
#include "few_algorithms.h"
#include "memory/heap.h"
#include "ranks.h"

namespace contract {

using namespace ringlet;

constexpr size_t kPeriod = 23;  // of value() in i

inline int value(int rank, size_t i) {
  return static_cast<int>((static_cast<size_t>(rank) * 7 + i * 3) % kPeriod) - 11;
}

/// Appends at(0), at(1), ... to the numbers, by copies, which take a sanitizer less time than a loop.
template <class At>
void append(std::vector<int>& numbers, size_t count, const At& at) {
  const size_t begin = numbers.size();
  numbers.resize(begin + count);
  int* const to = numbers.data() + begin;
  size_t done = std::min(count, kPeriod);
  for (size_t i = 0; i < done; ++i) to[i] = at(i);
  for (size_t more; done < count; done += more) {
    more = std::min(done, count - done);
    std::copy_n(to, more, to + done);
  }
}

inline std::vector<int> values(int rank, size_t count) {
  std::vector<int> numbers;
  append(numbers, count, [&](size_t i) { return value(rank, i); });
  return numbers;
}

/// What rank `rank` must hold in its output of `count` elements.
inline std::vector<int> expected(const Call& call, int rank, int world, size_t count) {
  const size_t own = static_cast<size_t>(rank) * call.count;  // where its part begins in what is divided
  const auto sum = [&](size_t i) {
    int all = 0;
    for (int q = 0; q < world; ++q) all += value(q, i);
    return all;
  };
  std::vector<int> numbers;
  if (count == 0) return numbers;  // no output here
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::reduce: append(numbers, count, sum); break;
    case Collective::reduce_scatter: append(numbers, count, [&](size_t i) { return sum(own + i); }); break;
    case Collective::broadcast: append(numbers, count, [&](size_t i) { return value(call.root, i); }); break;
    case Collective::scatter: append(numbers, count, [&](size_t i) { return value(call.root, own + i); }); break;
    case Collective::all_gather:
    case Collective::gather:
      for (int q = 0; q < world; ++q) append(numbers, call.count, [&](size_t i) { return value(q, i); });
      break;
    case Collective::all_to_all:
      for (int q = 0; q < world; ++q) append(numbers, call.count, [&](size_t i) { return value(q, own + i); });
      break;
    case Collective::barrier: break;
  }
  return numbers;
}

/// A tensor, in registered memory or not.
class Numbers {
 public:
  Numbers(size_t count, int value, bool registered)
      : count_(count), heap_(registered ? Heap::process() : nullptr), ordinary_(registered ? 0 : count) {
    data_ = registered ? reinterpret_cast<int*>(heap_->allocate(count * sizeof(int))) : ordinary_.data();
    std::fill_n(data_, count, value);
  }
  ~Numbers() {
    if (heap_) heap_->free(reinterpret_cast<std::byte*>(data_));
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  int& operator[](size_t i) { return data_[i]; }
  int* data() { return data_; }
  std::vector<int> values() const { return {data_, data_ + count_}; }
  void write(const std::vector<int>& numbers) { std::copy(numbers.begin(), numbers.end(), data_); }
  bool holds(const std::vector<int>& numbers) const {
    return numbers.size() == count_ && std::equal(numbers.begin(), numbers.end(), data_);
  }

 private:
  size_t count_;
  std::shared_ptr<Heap> heap_;
  std::vector<int> ordinary_;
  int* data_;
};

/// `given`: without a wait, and then waited for.
inline void try_call(Communicator& group, Call call, bool in_place, bool registered, bool given) {
  const int rank = group.rank(), world = group.world();
  const size_t inputs = input_elements(call, rank, world), outputs = output_elements(call, rank, world);
  Numbers input(inputs, 0, registered), output(outputs, -99, registered);
  const std::vector<int> before = values(rank, inputs);
  input.write(before);
  const bool same = in_place && (is_divided(call.collective)) && inputs == outputs;
  int* out = same ? input.data() : output.data();
  call.dtype = DType::int32;
  call.input = inputs == 0 ? nullptr : reinterpret_cast<const std::byte*>(input.data());
  call.output = outputs == 0 ? nullptr : reinterpret_cast<std::byte*>(out);
  if (call.collective == Collective::broadcast && inputs == 0) call.input = nullptr;
  given ? group.start(call, nullptr)->wait(std::chrono::seconds(60)) : group.run(call);
  const bool right = (same ? input : output).holds(expected(call, rank, world, outputs));
  CHECK(right);
  if (!same) CHECK(input.holds(before));
  if (!right) {
    std::fprintf(stderr, "  %s %s world %d count %zu root %d\n", name(call.collective), call.algorithm->name, world,
                 call.count, call.root);
  }
}

inline Call sum_of(Numbers& tensor, size_t count, const char* algorithm) {
  Call call;
  call.collective = Collective::all_reduce;
  call.algorithm = find_algorithm(Collective::all_reduce, algorithm);
  call.dtype = DType::int32;
  call.count = count;
  call.input = reinterpret_cast<const std::byte*>(tensor.data());
  call.output = reinterpret_cast<std::byte*>(tensor.data());
  return call;
}

/// Who is in another call hears so at once, and everybody who waits, with both calls named: also ranks to which others
/// were not connected when they failed and left.
inline void calls_that_do_not_match(Between between, const char* algorithm, size_t count, bool registered) {
  const auto errors = run_ranks(4, between, [&](Communicator& group) {
    const size_t own = group.rank() == 2 ? count / 2 : count;
    Numbers tensor(own, 1, registered);
    group.run(sum_of(tensor, own, algorithm));
  });
  for (const std::string& error : errors)
    CHECK_HAS(error, "InvalidUsage: ", std::to_string(count / 2) + " elements", std::to_string(count) + " elements");
}

/// The rank that is elsewhere is named by all, not only by those who wait for it directly.
inline void a_rank_that_does_not_come(int stuck, Between between, const char* algorithm, size_t count,
                                      bool registered) {
  const auto errors = run_ranks_but_one(stuck, 5, between, [&](Communicator& group) {
    Numbers tensor(count, 1, registered);
    group.run(sum_of(tensor, count, algorithm));
  });
  for (int rank = 0; rank < 5; ++rank) {
    if (rank != stuck) CHECK_HAS(errors[rank], "Timeout: ", "for rank " + std::to_string(stuck));
  }
}

/// A rank that leaves early is named, by those who waited for it and by those who waited for them.
inline void a_rank_that_leaves(Between between, const char* algorithm, size_t count, bool registered) {
  const auto errors = run_ranks(4, between, [&](Communicator& group) {
    Numbers tensor(count, 1, registered);
    group.run(sum_of(tensor, count, algorithm));
    CHECK(tensor.values() == std::vector<int>(count, 4));
    if (group.rank() != 1) group.run(sum_of(tensor, count, algorithm));
  });
  for (int rank = 0; rank < 4; ++rank) {
    if (rank != 1) CHECK_HAS(errors[rank], "PeerLost: ", "rank 1 left the group");
  }
  CHECK_EQ(errors[1], "");
}

inline void every_algorithm(int world, Between between, bool registered = false) {
  if (kSanitized && world % 2 == 0) return;  // odd worlds take all ways
  run_well(world, between, [&](Communicator& group) {
    const size_t w = static_cast<size_t>(world);
    int number = 0;
    for (const size_t count : {size_t{0}, size_t{1}, w - 1, w + 1, size_t{4100}, size_t{123567}}) {
      if (kSanitized && count < w) continue;  // takes the same ways as a larger one
      for (const Algorithm& algorithm : algorithms()) {
        Call call;
        call.collective = algorithm.collective;
        call.algorithm = &algorithm;
        if (count > 100'000 && !is_tried(algorithm, 4)) continue;  // an engine moves all alike
        call.count = is_divided(algorithm.collective) ? count : count / w;
        if (algorithm.collective == Collective::barrier) call.count = 0;
        for (const int root : {0, world - 1}) {
          call.root = has_root(algorithm.collective) ? root : 0;
          const bool given = (number + group.rank()) % 2 == 0;  // on some ranks only
          if (!kSanitized || number % 2 == 0) try_call(group, call, false, registered, given);
          if (!kSanitized || number % 2 == 1) try_call(group, call, true, registered, !given);
          ++number;
        }
      }
    }
  });
}

/// Scaled inputs of a 16-bit type: what one rank adds unrounded and another rounded would differ in the last bit.
inline void scaled_sums_agree(int world, Between between) {
  constexpr size_t kCount = 20000;
  std::vector<std::vector<uint16_t>> results(static_cast<size_t>(world), std::vector<uint16_t>(kCount));
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective != Collective::all_reduce) continue;
    run_well(world, between, [&](Communicator& group) {
      auto& mine = results[static_cast<size_t>(group.rank())];
      for (size_t i = 0; i < kCount; ++i) {
        mine[i] = static_cast<uint16_t>(0x3f80 + (i * 37 + static_cast<size_t>(group.rank()) * 101) % 128);  // 1 to 2
      }
      Call call;
      call.collective = Collective::all_reduce;
      call.algorithm = &algorithm;
      call.dtype = DType::bfloat16;
      call.op = ReduceOp::premul_sum;
      call.scale = 0.3 + 0.17 * group.rank();
      call.count = kCount;
      call.input = reinterpret_cast<const std::byte*>(mine.data());
      call.output = reinterpret_cast<std::byte*>(mine.data());
      group.run(call);
    });
    for (const auto& result : results) CHECK(result == results[0]);
  }
}

inline void point_to_point(Between between) {
  run_well(3, between, [&](Communicator& group) {
    const int rank = group.rank();
    for (const size_t count : {size_t{0}, size_t{1}, size_t{50000}, size_t{300001}}) {
      std::vector<int> out = values(rank, count), in(count, -1);
      const int next = (rank + 1) % 3, before = (rank + 2) % 3;
      const auto sent =
          group.start({next, true, DType::int32, count, reinterpret_cast<std::byte*>(out.data()), {}}, nullptr);
      group.run({before, false, DType::int32, count, reinterpret_cast<std::byte*>(in.data()), {}});
      sent->wait(std::chrono::seconds(60));
      CHECK(in == values(before, count));
    }
  });
}

inline void asynchronous(Between between) {
  run_well(2, between, [&](Communicator& group) {
    constexpr int kCalls = 50;
    std::vector<Floats> tensors(kCalls, Floats(3000));
    std::vector<std::shared_ptr<Work>> works;
    for (auto& tensor : tensors) {
      works.push_back(group.start(tensor.sum(), nullptr));
      if (works.size() % 7 == 0) group.run(tensor.sum());  // a synchronous call waits its turn behind them
    }
    for (auto& work : works) work->wait(std::chrono::seconds(60));
    for (int i = 0; i < kCalls; ++i) CHECK_EQ(tensors[i].values[2999], (i + 1) % 7 == 0 ? 4.0f : 2.0f);
  });
}

}  // namespace contract
