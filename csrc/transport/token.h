// Secrets and proofs: a rank shows that it knows a group's key without sending it.
//
// The proof is SipHash-2-4 with 128 bits over what both sides contributed, so a recorded one is worth nothing later.
// Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012. Pure functions but for random_token.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ringlet {

using Token = std::array<uint8_t, 16>;

/// From the system's source of randomness. Throws SystemError.
Token random_token();

/// The keyed digest of `data`.
Token siphash(const Token& key, std::span<const std::byte> data) noexcept;

/// In a time that does not depend on where they differ.
bool same(const Token& a, const Token& b) noexcept;

}  // namespace ringlet
