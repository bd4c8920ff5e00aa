// The congestion control of the connections: the machine's default, unless that is BBR.
//
// BBR paces each connection at the rate that it has measured. But the connections of a collective are idle, and then
// send much at once, in both directions and several through one link. The measured rate is out of date, and the link
// stays partly empty (docs/decisions/0017). RINGLET_TCP_CONGESTION names another one, or "system" for the default.
// Thread safety: all calls from any thread.
#pragma once

#include <string>

namespace ringlet {

/// The congestion control that the environment asks for now. Throws InvalidUsage if RINGLET_TCP_CONGESTION names one
/// that this machine does not have.
std::string find_congestion_control();

/// The same, decided once per process.
const std::string& congestion_control();

/// Call it before the socket connects or listens. Accepted connections get the setting of the listening socket.
void use_congestion_control(int socket) noexcept;

}  // namespace ringlet
