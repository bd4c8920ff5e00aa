// What calls are for, in the words of their caller: "unit 3 (head.weight)". Ranks compare the labels of a call, and its
// error names them.
//
// Contract: a label is a number of 16 bits, in the place of the root in the signature of a call without root. So it
// costs nothing on the wire. Equal lists of texts have equal labels in every process. Thread safety: all calls from any
// thread; set_call_label() concerns calls that its thread issues.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ringlet {

using CallLabel = uint16_t;
inline constexpr CallLabel kNoLabel = 0;

/// A label for each text, different from each other while there are at most 65535. Two lists may share labels.
std::vector<CallLabel> make_call_labels(const std::vector<std::string>& texts);
/// All texts of a label, joined by " or ".
std::string label_text(CallLabel label);

void set_call_label(CallLabel label) noexcept;
CallLabel call_label() noexcept;

}  // namespace ringlet
