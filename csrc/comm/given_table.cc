#include "comm/given_table.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

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

}  // namespace

GivenTable given_table() {
  GivenTable table;
  const char* wanted = std::getenv("RINGLET_TABLE");
  table.origin = wanted != nullptr ? wanted : usual_place();
  if (table.origin.empty()) return table;
  errno = 0;
  std::ifstream file(table.origin, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    if (wanted != nullptr || errno != ENOENT) table.problem = table.origin + ": " + std::strerror(errno);
  } else if (file.gcount() > kMostBytes) {
    table.problem = table.origin + ": larger than any table of rules, " + std::to_string(kMostBytes) + " bytes";
  } else {
    table.text = text.substr(0, static_cast<size_t>(file.gcount()));
  }
  return table;
}

}  // namespace ringlet
