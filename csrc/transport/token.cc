#include "transport/token.h"

#include <sys/random.h>

#include <bit>

#include "base/error.h"
#include "base/system_call.h"

namespace ringlet {
namespace {

uint64_t little_endian(const uint8_t* bytes, size_t n) {
  uint64_t word = 0;
  for (size_t i = 0; i < n; ++i) word |= uint64_t{bytes[i]} << (8 * i);
  return word;
}

struct SipState {
  uint64_t v0, v1, v2, v3;

  void rounds(int n) {
    for (int i = 0; i < n; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  }
  void absorb(uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  uint64_t squeeze() {
    rounds(4);
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

}  // namespace

Token random_token() {
  Token token;
  const auto draw = [&] { return ::getrandom(token.data(), token.size(), 0); };
  if (repeated(draw) != static_cast<ssize_t>(token.size())) throw_errno("getrandom");
  return token;
}

Token siphash(const Token& key, std::span<const std::byte> data) noexcept {
  const uint64_t k0 = little_endian(key.data(), 8), k1 = little_endian(key.data() + 8, 8);
  SipState state{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573};
  state.v1 ^= 0xee;  // marks the 128-bit variant
  const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
  const size_t whole = data.size() / 8 * 8;
  for (size_t i = 0; i < whole; i += 8) state.absorb(little_endian(bytes + i, 8));
  state.absorb(little_endian(bytes + whole, data.size() - whole) | uint64_t{data.size()} << 56);
  state.v2 ^= 0xee;
  const uint64_t low = state.squeeze();
  state.v1 ^= 0xdd;
  const uint64_t high = state.squeeze();
  Token digest;
  for (int i = 0; i < 8; ++i) {
    digest[i] = static_cast<uint8_t>(low >> (8 * i));
    digest[8 + i] = static_cast<uint8_t>(high >> (8 * i));
  }
  return digest;
}

bool same(const Token& a, const Token& b) noexcept {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace ringlet
