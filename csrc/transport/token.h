// Secrets and proofs: a rank proves that it knows a group's key and does not send the key.
//
// The proof is SipHash-2-4 with 128 bits, over nonces of both sides: a recorded proof is of no use later.
// Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012. Pure functions but for random_token.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ringlet {

using Token = std::array<uint8_t, 16>;

/// From the system's source of randomness. Throws ResourceError.
Token random_token();

/// The keyed digest of `data`.
Token siphash(const Token& key, std::span<const std::byte> data) noexcept;

/// The time that it takes does not depend on where they differ.
bool same(const Token& a, const Token& b) noexcept;

}  // namespace ringlet
