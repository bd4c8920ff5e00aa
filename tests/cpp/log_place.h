// A folder for the files of the log, and the environment that names them.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/log.h"

namespace ringlet {

class LogPlace {
 public:
  LogPlace() : folder_(std::filesystem::temp_directory_path() / ("ringlet-log-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~LogPlace() {
    set(nullptr, "");
    configure_log();
    std::filesystem::remove_all(folder_);
  }
  LogPlace(const LogPlace&) = delete;
  LogPlace& operator=(const LogPlace&) = delete;

  std::string file(const std::string& name) const { return (folder_ / name).string(); }
  static void set(const char* level, const std::string& file) {
    level != nullptr ? ::setenv("RINGLET_LOG", level, 1) : ::unsetenv("RINGLET_LOG");
    file.empty() ? ::unsetenv("RINGLET_LOG_FILE") : ::setenv("RINGLET_LOG_FILE", file.c_str(), 1);
  }
  /// From now on events go to the file.
  void begin(const char* level, const std::string& name) const {
    set(level, file(name));
    configure_log();
  }
  std::string text(const std::string& name) const {
    std::ifstream in(file(name));
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace ringlet
