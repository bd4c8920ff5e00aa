#include "base/processor.h"

#include <algorithm>
#include <cctype>
#include <fstream>

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

}  // namespace

const std::string& processor_model() {
  static const std::string model = read_model();
  return model;
}

}  // namespace ringlet
