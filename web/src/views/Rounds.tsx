// Rounds: what computers with the same layers agreed on, who was in it, what was refused and why, and what it took.

import type { RoundsSummary, RunContributor, StageVoter } from "../api/responses";
import type { NodeStatus } from "../api/status";
import type { NodeActions } from "../api/actions";
import { Pager, usePages } from "../components/Pager";
import { Card, Facts, Section, Stat, ToneMark } from "../components/parts";
import { PhaseLegend, RoundRow } from "../components/RoundRow";
import { bytes, count, percent, plural, shortTime } from "../format";
import { useReading } from "../state/reading";
import { abandonedCount, agreementWords, partWords, refusalsWords, refusedCount, roundsSentence, roundsTone, skippedWords, waitingSentence, who } from "../words/rounds";

const ROUNDS_SHOWN = 10;
const CONTRIBUTORS_SHOWN = 12;

interface Props {
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
}

export function Rounds({ status, nodeNow, reachable, actions }: Props) {
  const rounds = useReading(actions.readRounds, reachable, status.diloco.outer_steps);
  return (
    <Section title="Rounds">
      {rounds ? <Content {...{ rounds, status, nodeNow }} /> : <p class="muted">Asking the node…</p>}
    </Section>
  );
}

function Content({ rounds, status, nodeNow }: { rounds: RoundsSummary; status: NodeStatus; nodeNow: number }) {
  const isEmpty = rounds.rounds.length === 0;
  return (
    <>
      <Summary rounds={rounds} status={status} />
      {isEmpty ? <WhatTheyAre /> : <Numbers rounds={rounds} />}
      {!isEmpty && <LastRounds rounds={rounds} ownId={status.node_id} nodeNow={nodeNow} />}
      {rounds.voters.length > 0 && <Voters voters={rounds.voters} ownId={status.node_id} />}
      {rounds.contributors.length > 0 && <Contributors contributors={rounds.contributors} ownId={status.node_id} />}
    </>
  );
}

function Summary({ rounds, status }: { rounds: RoundsSummary; status: NodeStatus }) {
  const tone = roundsTone(rounds);
  const isEmpty = rounds.rounds.length === 0;
  return (
    <section class={`verdict tone-${tone}`} aria-labelledby="rounds-sentence">
      <div class="swarm-head">
        <ToneMark tone={tone} />
        <h2 id="rounds-sentence">{roundsSentence(rounds, status)}</h2>
      </div>
      <Facts
        rows={[
          isEmpty ? ["What it waits for", waitingSentence(status)] : ["Agreement", agreementWords(rounds)],
          isEmpty ? null : ["Skipped audits", skippedWords(rounds)],
          ["Learning together", status.diloco.explanation],
          status.diloco.strategy ? ["The next round", `is about ${partWords(status.diloco)}, encoded as ${status.diloco.codec}`] : null,
          isEmpty && status.peer_count === 0 ? ["What helps", <a href="#/invite">Invite another computer</a>] : null,
        ]}
      />
    </section>
  );
}

function WhatTheyAre() {
  return (
    <Card title="What a round is">
      <p>
        Computers that hold the same layers learn apart for many steps. In a round they exchange what they learned, check every contribution, and
        agree by two votes on one result. Then all of them hold the same weights, bit for bit, even if some are slow, gone or hostile.
      </p>
    </Card>
  );
}

function Numbers({ rounds }: { rounds: RoundsSummary }) {
  const [newest] = rounds.rounds;
  const abandoned = abandonedCount(rounds);
  return (
    <dl class="stats">
      <Stat label="Completed" value={count(rounds.completed)} note={`${percent(rounds.sync_success_rate)} of all; ${count(abandoned)} came to nothing`} />
      <Stat label="Refused" value={count(refusedCount(rounds))} note={`of ${plural(rounds.accepted + refusedCount(rounds), "contribution")}; ${refusalsWords(rounds)}`} />
      <Stat label="Last round" value={shortTime(newest?.seconds)} note={`from entering it to its end; contributions encoded as ${newest?.codec ?? "–"}`} />
      <Stat label="Sent" value={bytes(rounds.bytes_sent)} note={`in all rounds, and ${bytes(rounds.bytes_received)} received`} />
    </dl>
  );
}

function LastRounds({ rounds, ownId, nodeNow }: { rounds: RoundsSummary; ownId: string | null; nodeNow: number }) {
  const [shown, pager] = usePages(rounds.rounds, ROUNDS_SHOWN);
  const longest = Math.max(...rounds.rounds.map((round) => round.seconds ?? 0), 1e-9);
  const isOfSeveral = new Set(rounds.rounds.map((round) => round.stage)).size > 1;
  return (
    <Card title="The last rounds" hint="The newest first. The list begins again with every start of the node." wide>
      <PhaseLegend />
      <ol class="rounds" aria-label="The last rounds, the newest first">
        {shown.map((round) => (
          <RoundRow key={`${round.stage}:${round.ended_at}`} {...{ round, longest, ownId, nodeNow, isOfSeveral }} />
        ))}
      </ol>
      <Pager {...pager} name="Pages of the last rounds" />
    </Card>
  );
}

function Voters({ voters, ownId }: { voters: readonly StageVoter[]; ownId: string | null }) {
  const [shown, pager] = usePages(voters, CONTRIBUTORS_SHOWN);
  const isOfSeveral = new Set(voters.map((voter) => voter.stage)).size > 1;
  return (
    <Card
      title="Who votes"
      hint="Their votes decide how a round ends. A friend that joins later gets a vote after 30 minutes of accepted work."
      wide
    >
      <div class="scroll" tabIndex={0} role="region" aria-label="List of voters">
        <table>
          <thead>
            <tr>
              {isOfSeveral && <th scope="col">Stage</th>}
              <th scope="col">Node</th>
              <th scope="col">Wallet</th>
              <th scope="col">Now</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((one) => (
              <tr key={`${one.stage}:${one.node_id}`}>
                {isOfSeveral && <td>{count(one.stage + 1)}</td>}
                <th scope="row" class={one.is_here ? "" : "mono"} title={one.node_id}>
                  {who(one.node_id, ownId)}
                </th>
                <td class="mono" title={one.wallet_id}>
                  {one.wallet_id.slice(0, 8)}
                  {one.is_owner && " (owner)"}
                </td>
                <td class={one.is_online ? "" : "text-warn"}>{one.is_online ? "online" : "no answer"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Pager {...pager} name="Pages of the voters" />
    </Card>
  );
}

function Contributors({ contributors, ownId }: { contributors: readonly RunContributor[]; ownId: string | null }) {
  const [shown, pager] = usePages(contributors, CONTRIBUTORS_SHOWN);
  return (
    <Card title="Who contributed" hint="To completed rounds, since the start of this computer's node." wide>
      <div class="scroll" tabIndex={0} role="region" aria-label="List of contributors">
        <table>
          <thead>
            <tr>
              <th scope="col">Node</th>
              <th scope="col">Rounds</th>
              <th scope="col">Accepted</th>
              <th scope="col">Refused</th>
              <th scope="col">Sent nothing</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((one) => (
              <tr key={one.node_id}>
                <th scope="row" class={one.is_here ? "" : "mono"} title={one.node_id}>
                  {who(one.node_id, ownId)}
                </th>
                <td>{count(one.rounds)}</td>
                <td>{count(one.accepted)}</td>
                <td class={one.refused > 0 ? "text-warn" : ""}>{count(one.refused)}</td>
                <td>{count(one.absent)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Pager {...pager} name="Pages of the contributors" />
    </Card>
  );
}
