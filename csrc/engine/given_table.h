// The table of rules that this process's user gives (engine/rule.h): the file that RINGLET_TABLE names, or
// ringlet/table in $XDG_CONFIG_HOME or ~/.config if there is one that can be read. RINGLET_TABLE set to nothing: none.
//
// Pure values. Thread safety: any, as long as nobody changes the environment.
#pragma once

#include <string>

namespace ringlet {

struct GivenTable {
  std::string origin;   ///< the file, or where it would be; empty: nowhere
  std::string text;     ///< empty: nothing is given
  std::string problem;  ///< why the file that RINGLET_TABLE names cannot be read; empty: it can, or there is none
  std::string warning;  ///< why the file of the usual place, which nobody has named, is not used; empty: it is
};

GivenTable given_table();

}  // namespace ringlet
