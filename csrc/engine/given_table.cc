#include "engine/given_table.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "base/processor.h"
#include "engine/rule.h"

namespace ringlet {
namespace {

// A table is some lines; more is another file by mistake, and all ranks would be handed it.
constexpr std::streamsize kMostBytes = 256 << 10;

std::string usual_place() {
  const char* config = std::getenv("XDG_CONFIG_HOME");
  if (config != nullptr && *config != '\0') return std::string(config) + "/ringlet/table";
  const char* home = std::getenv("HOME");
  return home != nullptr && *home != '\0' ? std::string(home) + "/.config/ringlet/table" : "";
}

/// Reads the file at `origin`. `named`: that it is not there is a problem, too.
GivenTable read_table(const std::string& origin, bool named) {
  GivenTable table{origin, "", "", ""};
  errno = 0;
  std::ifstream file(table.origin, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    const bool absent = errno == ENOENT || errno == ENOTDIR;
    if (named || !absent) table.problem = origin + ": " + std::strerror(errno);
  } else if (file.gcount() > kMostBytes) {
    table.problem = origin + ": larger than any table of rules, " + std::to_string(kMostBytes) + " bytes";
  } else {
    table.text = text.substr(0, static_cast<size_t>(file.gcount()));
  }
  return table;
}

}  // namespace

GivenTable given_table() {
  if (const char* wanted = std::getenv("RINGLET_TABLE")) {
    if (*wanted == '\0') return {};
    GivenTable table = read_table(wanted, true);
    if (!table.problem.empty()) table.problem = "RINGLET_TABLE names a table that cannot be read: " + table.problem;
    return table;
  }
  const std::string place = usual_place();
  if (place.empty()) return {};
  GivenTable table = read_table(place, false);
  try {
    parse_table(table.text, place, processor_model());
  } catch (const InvalidUsage& error) {
    table.problem = error.what();
  }
  if (table.problem.empty()) return table;
  return {place, "", "", "the table of rules is not used: " + table.problem + "; RINGLET_TABLE= reads none"};
}

}  // namespace ringlet
