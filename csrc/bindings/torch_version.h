// What differs between the torch versions that the bindings compile against (2.11 to 2.15); the only place that asks.
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#define RINGLET_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

// A gather into one tensor is a virtual of its own from 2.14 on, as are the new names of the *_single collectives.
// Those forward to the old names, which stand in every version.
#define RINGLET_TORCH_HAS_GATHER_SINGLE RINGLET_TORCH_AT_LEAST(14)
