// The network: who is there, what all of them reach together, how this computer is connected, how to invite others.

import type { NetworkStatus, NodeStatus, PeerStatus } from "../api/status";
import type { ComponentChildren } from "preact";
import { INVITE } from "../arrival/words";
import { CopyLine } from "../components/CopyLine";
import { PeerList } from "../components/PeerList";
import { Arrow } from "../components/PeerRow";
import { Bar, Card, Facts, Section, Stat, ToneMark } from "../components/parts";
import { bigCount, bytes, count, loss, percent, plural } from "../format";
import { lineSpeed } from "../words/presets";
import type { Dashboard } from "../state/store";
import { comparison, namesFolder, needsInvitation, networkTone, onlyHere, outsideWords, rate, reasonWords, swarmSentence, together } from "../words/swarm";

interface Props {
  dashboard: Dashboard;
  status: NodeStatus;
  nodeNow: number;
}

export function Swarm({ dashboard, status, nodeNow }: Props) {
  const { peers } = dashboard;
  const { network } = status;
  const alone = status.peer_count === 0 && peers.length === 0;
  return (
    <Section title="Swarm">
      <Summary status={status} peers={peers} />
      {alone ? <Alone status={status} /> : <Numbers status={status} />}
      {!alone && <PeerList status={status} peers={peers} nodeNow={nodeNow} />}
      <div class="grid grid-two">
        {alone ? <Addresses network={network} /> : <Invite status={status} />}
        <Connections network={network} peers={peers} />
      </div>
    </Section>
  );
}

function Summary({ status, peers }: { status: NodeStatus; peers: readonly PeerStatus[] }) {
  const { network, run } = status;
  const tone = networkTone(network.state);
  return (
    <section class={`verdict tone-${tone}`} aria-labelledby="swarm-sentence">
      <div class="swarm-head">
        <ToneMark tone={tone} />
        <h2 id="swarm-sentence">{swarmSentence(status, peers)}</h2>
      </div>
      <Facts
        rows={[
          ["Network", network.explanation],
          run ? ["Run", run.explanation] : null,
        ]}
      />
    </section>
  );
}

function Numbers({ status }: { status: NodeStatus }) {
  const { network, swarm, training } = status;
  const speed = together(status);
  const nodes = swarm?.nodes ?? status.peer_count + 1;
  const share = speed > 0 ? ` (${percent((training.tokens_per_second ?? 0) / speed)})` : "";
  return (
    <dl class="stats">
      <Stat label="Nodes" value={count(nodes)} note={swarm ? activityNote(nodes, swarm.training_nodes) : "you among them"} />
      <Stat label="Network loss" value={loss(swarm?.global_loss)} note={comparison(training.loss_ema, swarm?.global_loss)} />
      <Stat label="Tokens per second" value={bigCount(speed)} note={`yours ${count(training.tokens_per_second)}${share}`} />
      <Stat
        label="Traffic"
        value={<TrafficNow network={network} />}
        note={`${bytes(network.bytes_sent)} sent, ${bytes(network.bytes_received)} received`}
      />
    </dl>
  );
}

function activityNote(nodes: number, training: number): string {
  if (training >= nodes) return "all of them train now";
  return training === 0 ? "none of them trains now" : `${count(training)} of them ${training === 1 ? "trains" : "train"} now`;
}

function TrafficNow({ network }: { network: NetworkStatus }) {
  return (
    <span class="traffic-now">
      <span>
        <Arrow up /> {rate(network.upload_rate)}
      </span>
      <span>
        <Arrow up={false} /> {rate(network.download_rate)}
      </span>
    </span>
  );
}

function Alone({ status }: { status: NodeStatus }) {
  const { network, run } = status;
  const steps: ComponentChildren[] = needsInvitation(network.join_line)
    ? [
        <>
          <a href="#/invite">Make an invitation</a> and send it to the other computer: yours or a friend's.
        </>,
        "Install NeuroShard there, and join with the invitation.",
        "The computer shows up on this page within seconds.",
      ]
    : [
        "Install NeuroShard on another computer: yours or a friend's.",
        network.join_line ? (
          <>
            Start it there with this line:
            <CopyLine text={network.join_line} name="Join line" />
          </>
        ) : (
          "Start it there with the join line. It appears here as soon as this node can be reached."
        ),
        onlyHere(network.addresses)
          ? "It shows up on this page within seconds."
          : "It shows up on this page within seconds. In the same home network, computers usually find each other without the line.",
      ];
  return (
    <Card title="Invite a friend" hint="Training continues either way; with others it is faster." wide>
      {run?.is_demo ? (
        <p>{INVITE.demo}</p>
      ) : (
        <>
          <ol class="steps">
            {steps.map((step, index) => (
              <li key={index}>{step}</li>
            ))}
          </ol>
          <Hindrance network={network} />
        </>
      )}
    </Card>
  );
}

function Invite({ status }: { status: NodeStatus }) {
  const { network, run } = status;
  return (
    <Card title="Invite others">
      {run?.is_demo ? (
        <p>{INVITE.demo}</p>
      ) : (
        <>
          <HowToJoin line={network.join_line} />
          <Hindrance network={network} />
        </>
      )}
      <h3 class="muted small">Addresses under which others reach this node</h3>
      <AddressList network={network} />
    </Card>
  );
}

function HowToJoin({ line }: { line: string }) {
  if (needsInvitation(line)) {
    return (
      <p>
        <a href="#/invite">Make an invitation</a> for each computer that you want in this run.
      </p>
    );
  }
  if (line === "") return <p class="muted">There is no join line while nobody can reach this node.</p>;
  return (
    <>
      <p>A computer that starts NeuroShard with this line joins this run.</p>
      <CopyLine text={line} name="Join line" />
    </>
  );
}

/** The reason why others cannot join with the line as it is. */
function Hindrance({ network }: { network: NetworkStatus }) {
  if (onlyHere(network.addresses)) {
    return <p class="small text-warn">The addresses of this node lead to this computer itself: only programs on it can join.</p>;
  }
  if (needsInvitation(network.join_line) || !namesFolder(network.join_line)) return null; // friends get the data from the nodes
  return <p class="small text-warn">The data is in a folder of this computer. Others need a copy of it, and must put the path of their copy into the line.</p>;
}

function Addresses({ network }: { network: NetworkStatus }) {
  return (
    <Card title="Where this computer is" hint="Addresses under which others reach this node.">
      <AddressList network={network} />
    </Card>
  );
}

function AddressList({ network }: { network: NetworkStatus }) {
  if (network.addresses.length === 0) return <p class="muted">None at the moment.</p>;
  const outside = outsideWords(network.reachable);
  return (
    <>
      <ul class="addresses">
        {network.addresses.map((address) => (
          <li key={address}>
            <code>{address}</code>
          </li>
        ))}
      </ul>
      {outside !== "" && <p class={network.reachable ? "small muted" : "small text-warn"}>{outside}</p>}
    </>
  );
}

function Connections({ network, peers }: { network: NetworkStatus; peers: readonly PeerStatus[] }) {
  const { upload_limit: limit } = network;
  const refused = Object.entries(network.refused).filter(([, times]) => times > 0);
  const tally = (kind: PeerStatus["connection"]) => peers.filter((peer) => peer.connection === kind).length;
  const local = tally("in_memory");
  return (
    <Card title="Connections" hint="How this computer talks to the others.">
      {limit !== null && limit > 0 && (
        <Bar label="Upload" fraction={(network.upload_rate ?? 0) / limit} text={`${rate(network.upload_rate)} of at most ${rate(limit)}`} />
      )}
      <Facts
        rows={[
          ["Open", plural(network.connections, "connection")],
          ["To peers", `${count(tally("direct") + local)} direct, ${count(tally("punched"))} punched, ${count(tally("relayed"))} relayed`],
          ["Sent", `${bytes(network.bytes_sent)}, now ${rate(network.upload_rate)}`],
          ["Received", `${bytes(network.bytes_received)}, now ${rate(network.download_rate)}`],
          limit === null ? ["Upload limit", "none"] : null,
          ["Line", lineSpeed(network.line_upload, network.line_measured_at)],
          ["Banned", network.banned_peers === 0 ? "nobody" : plural(network.banned_peers, "peer")],
          ["Refused", refused.length === 0 ? "nothing so far" : <Refused reasons={refused} />],
        ]}
      />
    </Card>
  );
}

function Refused({ reasons }: { reasons: [string, number][] }) {
  const ordered = [...reasons].sort((a, b) => b[1] - a[1]);
  return (
    <ul>
      {ordered.map(([reason, times]) => (
        <li key={reason}>
          {reasonWords(reason)}: {plural(times, "time")}
        </li>
      ))}
    </ul>
  );
}
