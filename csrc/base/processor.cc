#include "base/processor.h"

#include <algorithm>
#include <cctype>
#include <fstream>

#include "base/process.h"

namespace ringlet {
namespace {

std::string read_model() {
  std::ifstream about("/proc/cpuinfo");
  std::string model;
  for (std::string line; std::getline(about, line) && !line.empty();) {  // of the first processor
    const std::string key = line.substr(0, line.find_last_not_of(" \t", line.find(':') - 1) + 1);
    const bool told = key == "vendor_id" || key == "cpu family" || key == "model" ||  // x86-64
                      key == "CPU implementer" || key == "CPU part";                  // aarch64
    if (!told || line.find(':') == line.npos) continue;
    std::string value = line.substr(line.find(':') + 1);
    std::erase_if(value, [](unsigned char c) { return std::isalnum(c) == 0; });
    model += model.empty() ? value : "-" + value;
  }
  return model.empty() ? "unknown" : model;
}

/// A step of Kuhn's algorithm for bipartite matching: gives `who` a processor, and other owners another one if they must
/// give theirs up.
bool give_processor(const std::vector<cpu_set_t>& usable, size_t who, std::vector<int>& owners, cpu_set_t& tried) {
  for (size_t p = 0; p < owners.size(); ++p) {
    if (!CPU_ISSET(p, &usable[who]) || owners[p] >= 0) continue;
    owners[p] = static_cast<int>(who);
    return true;
  }
  for (size_t p = 0; p < owners.size(); ++p) {
    if (!CPU_ISSET(p, &usable[who]) || CPU_ISSET(p, &tried)) continue;
    CPU_SET(p, &tried);
    if (!give_processor(usable, static_cast<size_t>(owners[p]), owners, tried)) continue;
    owners[p] = static_cast<int>(who);
    return true;
  }
  return false;
}

}  // namespace

const std::string& processor_model() {
  struct Read {
    const std::string model = read_model();
  };
  static constinit OfProcess<Read> of_process;
  return of_process.get().model;
}

cpu_set_t usable_processors() noexcept {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) CPU_ZERO(&usable);
  return usable;
}

bool one_processor_each(const std::vector<cpu_set_t>& usable) {
  std::vector<int> owners(CPU_SETSIZE, -1);
  for (size_t who = 0; who < usable.size(); ++who) {
    cpu_set_t tried;
    CPU_ZERO(&tried);
    if (!give_processor(usable, who, owners, tried)) return false;
  }
  return true;
}

}  // namespace ringlet
