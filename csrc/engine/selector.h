// Which algorithm `auto` means: rules that were given, then the built-in ones, so that every situation has one.
//
// The choice is the same on every rank by construction: a group's ranks hold the same rules (comm/join.h), and all that
// rules look at is the same on every rank. Thread safety: immutable once made.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "engine/rule.h"

namespace ringlet {

class Selector {
 public:
  /// The built-in rules alone.
  Selector() : Selector("", "") {}
  /// Those of `table` before them. Throws as parse_rules().
  Selector(std::string_view table, const std::string& origin);

  const Algorithm& choose(const Situation& situation) const { return *rule_for(situation).algorithm; }
  const Rule& rule_for(const Situation& situation) const;

  /// What the rules of a collective name that this process added; whether any rule does.
  std::vector<const Algorithm*> authored(Collective collective) const;
  bool names_authored() const { return names_authored_; }

  /// Where the table is from; empty: there is none.
  const std::string& origin() const { return origin_; }

 private:
  std::array<std::vector<Rule>, kCollectives> rules_;
  bool names_authored_ = false;
  std::string origin_;
};

/// The built-in rules, as text.
std::string_view built_in_rules() noexcept;

/// The algorithm of that name; "auto" gives null. Throws InvalidUsage that lists the names there are.
const Algorithm* named_algorithm(Collective collective, std::string_view name);

}  // namespace ringlet
