// The network in one line of the overview, with a way to all of it.

import type { NodeStatus } from "../api/status";
import { networkTone, swarmLine } from "../words/swarm";

export function SwarmLine({ status }: { status: NodeStatus }) {
  const alone = status.peer_count === 0;
  return (
    <p class={`swarm-line tone-${networkTone(status.network.state)}`}>
      <i class="dot" aria-hidden="true" />
      <span>{swarmLine(status)}</span>
      <a href="#swarm">{alone ? "Invite somebody" : "Who is there"}</a>
    </p>
  );
}
