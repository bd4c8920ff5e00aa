#include "engine/rule.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "engine/authored.h"

namespace ringlet {
namespace {

constexpr std::pair<std::string_view, Medium> kMedia[] = {
    {"memory", Medium::memory}, {"registered", Medium::registered},
    {"staged", Medium::staged}, {"network", Medium::network},
    {"hosts", Medium::hosts},   {"apart", Medium::apart},
    {"peers", Medium::peers},   {"nccl", Medium::nccl},
    {"gpus", Medium::gpus},
};
constexpr std::pair<std::string_view, int> kUnits[] = {{"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};

template <class Number>
std::optional<Number> whole_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <class Value, size_t n>
std::optional<Value> find(const std::pair<std::string_view, Value> (&known)[n], std::string_view word) {
  for (const auto& [name, value] : known) {
    if (name == word) return value;
  }
  return std::nullopt;
}

/// The words of a line, read from the left.
class Line {
 public:
  Line(std::string_view text, const std::string& origin, size_t number)
      : origin_(origin), place_(origin + ", line " + std::to_string(number)) {
    constexpr std::string_view kBlank = " \t\r";
    text = text.substr(0, text.find('#'));
    for (size_t begin = 0; (begin = text.find_first_not_of(kBlank, begin)) != text.npos;) {
      const size_t end = std::min(text.find_first_of(kBlank, begin), text.size());
      words_.push_back(text.substr(begin, end - begin));
      begin = end;
    }
  }

  bool empty() const { return words_.empty(); }
  bool tunes() const { return !words_.empty() && words_[0] == "tuned"; }

  /// Of a line that tunes.
  void tune(Tuning& tuning, std::string_view processor) {
    at_ = 1;
    const std::string_view word = next("a name");
    const auto member = find(kTuned, word);
    if (!member) refuse(quoted(word) + " cannot be tuned: give one of " + tuned_names());
    const size_t value = size();
    if (word.find("_segment_") != word.npos && (value == 0 || value % kSegmentUnit != 0)) {
      refuse(std::string(word) + " must be a multiple of 4KiB");
    }
    std::string_view whose = processor;
    if (at_ < words_.size()) {
      if (const auto condition = next("\"processor\""); condition != "processor") {
        refuse(quoted(condition) + " is not a condition of a tuned size: give processor MODEL, or none");
      }
      whose = next("a processor");
    }
    if (at_ < words_.size()) refuse("nothing can follow the processor");
    if (whose == processor) tuning.*(*member) = value;
  }

  Rule rule() {
    const std::string_view first = next("a collective");
    const auto collective = parse_collective(first);
    if (!collective) refuse(quoted(first) + " is not a collective: give one of " + collective_names());
    Rule rule{*collective};
    while (at_ + 1 < words_.size()) condition(rule);
    const std::string_view last = next("an algorithm");
    if (rule.medium == Medium::gpus) {
      way(rule, last);
    } else {
      algorithm(rule, last);
    }
    if (rule.least_bytes > rule.most_bytes) refuse("the size range is empty: its lower limit is above its upper limit");
    rule.source = origin_ + ":";
    for (const std::string_view word : words_) rule.source += ' ' + std::string(word);
    return rule;
  }

 private:
  static std::string tuned_names() {
    std::string names;
    for (const auto& [name, member] : kTuned) names += (names.empty() ? "" : ", ") + std::string(name);
    return names;
  }

  static std::string quoted(std::string_view word) { return '"' + std::string(word) + '"'; }

  void algorithm(Rule& rule, std::string_view last) const {
    const Collective collective = rule.collective;
    rule.algorithm = last == "nccl" ? nccls_own(collective) : find_any_algorithm(collective, last);
    if (rule.algorithm != nullptr) return;
    refuse(std::string(name(collective)) + ": algorithm must be one of " + algorithm_names(collective) + ", got " +
           quoted(last));
  }

  void way(Rule& rule, std::string_view last) const {
    if (last != "peers" && last != "nccl") {
      refuse("a rule for gpus ends with the way that calls go, peers or nccl, got " + quoted(last));
    }
    if (rule.collective == Collective::all_to_all && (given_.contains("up") || given_.contains("above"))) {
      refuse("all_to_all for gpus takes no size: no rank knows how long the blocks of the others are");
    }
    rule.way = last == "peers" ? Way::peers : Way::nccl;
  }

  [[noreturn]] void refuse(const std::string& why) const { throw InvalidUsage(place_ + ": " + why); }

  std::string_view next(const std::string& what) {
    if (at_ == words_.size()) refuse("the line ends, but " + what + " must follow");
    return words_[at_++];
  }

  void condition(Rule& rule) {
    const std::string_view word = next("a condition");
    const auto medium = find(kMedia, word);
    if (!given_.insert(medium ? "medium" : word).second) {
      refuse(quoted(word) + (medium ? ": a rule has one kind of memory or transport" : " is given twice"));
    }
    if (medium) {
      rule.medium = *medium;
    } else if (word == "above") {
      rule.least_bytes = size() + 1;
    } else if (word == "up") {
      if (next("\"to\"") != "to") refuse("\"up\" must be followed by \"to\"");
      rule.most_bytes = size();
    } else if (word == "world") {
      world(rule);
    } else {
      refuse(
          quoted(word) +
          " is not a condition: give one of above SIZE, up to SIZE, world N, world N-M, world N-, memory, registered, "
          "staged, network, hosts, apart, peers, nccl, gpus");
    }
  }

  size_t size() {
    const std::string_view word = next("a size");
    const size_t digits = std::min(word.find_first_not_of("0123456789"), word.size());
    const auto number = whole_number<size_t>(word.substr(0, digits));
    const auto shift = find(kUnits, word.substr(digits));
    if (!number || !shift || *number > (std::numeric_limits<size_t>::max() >> 1 >> *shift)) {
      refuse(quoted(word) + " is not a size: give a whole number with B, KiB, MiB or GiB, as in 32KiB");
    }
    return *number << *shift;
  }

  void world(Rule& rule) {
    const std::string_view word = next("a world");
    const size_t dash = word.find('-');
    const auto least = whole_number<int>(word.substr(0, dash));
    const std::string_view end = dash == word.npos ? word : word.substr(dash + 1);
    const auto most = end.empty() ? rule.most_world : whole_number<int>(end);
    if (!least || !most || *least < 1 || *most < *least) {
      refuse(quoted(word) + " is not a world size: give 4, 2-4, or 5- for 5 and more");
    }
    rule.least_world = *least;
    rule.most_world = *most;
  }

  const std::string& origin_;
  std::string place_;
  std::vector<std::string_view> words_;
  size_t at_ = 0;
  std::set<std::string_view> given_;
};

bool holds(Medium medium, const Situation& situation) noexcept {
  const bool on_host = situation.way == Way::host;
  switch (medium) {
    case Medium::anything: return true;
    case Medium::memory: return on_host && !situation.network;
    case Medium::registered: return on_host && !situation.network && situation.in_place;
    case Medium::staged: return on_host && !situation.network && !situation.in_place;
    case Medium::network: return situation.network;
    case Medium::hosts: return situation.network && situation.shared_hosts;
    case Medium::apart: return situation.network && !situation.shared_hosts;
    case Medium::peers: return situation.way == Way::peers;
    case Medium::nccl: return situation.way == Way::nccl;
    case Medium::gpus: return false;  // decides before there is a way
  }
  return false;
}

}  // namespace

bool Rule::in_range(Collective which, size_t bytes, int world) const noexcept {
  return which == collective && bytes >= least_bytes && bytes <= most_bytes && world >= least_world &&
         world <= most_world;
}

bool Rule::fits(const Situation& situation) const noexcept {
  return in_range(situation.collective, situation.bytes, situation.world) && holds(medium, situation) &&
         (situation.nccls_own || !is_nccls_own(algorithm));
}

Table parse_table(std::string_view table, const std::string& origin, std::string_view processor) {
  Table parsed;
  for (size_t begin = 0, number = 1; begin < table.size(); ++number) {
    const size_t end = std::min(table.find('\n', begin), table.size());
    Line line(table.substr(begin, end - begin), origin, number);
    if (line.tunes()) {
      line.tune(parsed.tuning, processor);
    } else if (!line.empty()) {
      parsed.rules.push_back(line.rule());
    }
    begin = end + 1;
  }
  return parsed;
}

}  // namespace ringlet
