// Which congestion control the connections use: the machine's, unless that is BBR.
//
// BBR paces each connection at the rate that it has measured. A collective's connections are idle, then send all they
// have, two ways at once and several through one link: the measure is of the past, and the link stays partly empty.
// docs/decisions/0017. RINGLET_TCP_CONGESTION names another, or "system" for the machine's.
// Thread safety: all calls from any thread.
#pragma once

#include <string>

namespace ringlet {

/// What the environment asks for now. Throws InvalidUsage where RINGLET_TCP_CONGESTION names one that is not to be had
/// here.
std::string find_congestion_control();

/// Decided once per process. Throws InvalidUsage where RINGLET_TCP_CONGESTION names one that is not to be had here.
const std::string& congestion_control();

/// Before the socket connects or listens: who comes in gets the listener's.
void use_congestion_control(int socket) noexcept;

}  // namespace ringlet
