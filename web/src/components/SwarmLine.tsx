// The network in one line of the overview, with a way to all of it.

import type { NodeStatus } from "../api/status";
import { networkTone, swarmLine } from "../words/swarm";

export function SwarmLine({ status }: { status: NodeStatus }) {
  return (
    <p class={`swarm-line tone-${networkTone(status.network.state)}`}>
      <i class="dot" aria-hidden="true" />
      <span>{swarmLine(status)}</span>
      <a href="#swarm">{wayOn(status)}</a>
    </p>
  );
}

/** Nobody can be invited while the network is off. */
function wayOn(status: NodeStatus): string {
  if (status.network.state === "off") return "Why is it off?";
  return status.peer_count === 0 ? "Invite a friend" : "Who is there";
}
