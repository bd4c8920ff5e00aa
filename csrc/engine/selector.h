// The selector chooses the algorithm of `auto`: by the given rules, then by the built-in rules, one of which always
// fits.
//
// Every rank makes the same choice: all ranks of a group have the same rules (comm/group_init.h), and rules depend only
// on what is the same on every rank. Thread safety: immutable once made.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/processor.h"
#include "engine/rule.h"

namespace ringlet {

class Selector {
 public:
  /// The built-in rules alone.
  Selector() : Selector("", "") {}
  /// The rules of `table`, then the built-in ones. Throws as parse_table().
  Selector(std::string_view table, const std::string& origin, std::string_view processor = processor_model());

  const Algorithm& choose(const Situation& situation) const { return *rule_for(situation).algorithm; }
  const Rule& rule_for(const Situation& situation) const;

  /// How the table says that such calls on GPUs go; nothing: it says nothing. bytes: of no account in an all-to-all.
  std::optional<Way> way_for(Collective collective, size_t bytes, int world) const;

  /// The added algorithms that the rules of a collective name for some call in such a group. topology: null if all
  /// ranks read each other's memory.
  std::vector<const Algorithm*> authored(Collective collective, int world, const Topology* topology) const;
  /// Whether the table has rules for the collective.
  bool has_given(Collective collective) const { return given_[static_cast<size_t>(collective)]; }
  bool names_authored() const { return names_authored_; }

  /// The sizes of the pull engine: of the table, or built in.
  const Tuning& tuning() const { return tuning_; }

  /// The source of the table, for messages; empty: there is none.
  const std::string& origin() const { return origin_; }

 private:
  std::array<std::vector<Rule>, kCollectives> rules_;
  std::array<bool, kCollectives> given_{};
  std::vector<Rule> ways_;
  Tuning tuning_;
  bool names_authored_ = false;
  std::string origin_;
};

/// The built-in rules, as text.
std::string_view built_in_rules() noexcept;

/// The algorithm of that name; null for "auto". For an unknown name throws InvalidUsage that lists the names.
const Algorithm* named_algorithm(Collective collective, std::string_view name);

}  // namespace ringlet
