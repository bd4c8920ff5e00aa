// The differences between the torch versions that the bindings compile against (2.11 to 2.15). No other file checks the
// version.
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#define RINGLET_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

// From 2.14 on, a gather into one tensor is a virtual function, and so are the new names of the *_single collectives.
// The new names forward to the old ones, which every version has.
#define RINGLET_TORCH_HAS_GATHER_SINGLE RINGLET_TORCH_AT_LEAST(14)
