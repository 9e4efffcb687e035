// The pipeline: the stages and who holds them, the way of the microbatches, and what holds them up.

import type { PipelineFlow, PipelineSummary, StageStatus } from "../api/responses";
import type { NodeStatus } from "../api/status";
import type { NodeActions } from "../api/actions";
import { Pager, usePages } from "../components/Pager";
import { MicrobatchTraces } from "../components/MicrobatchTraces";
import { Bar, Card, Facts, Section, Stat, ToneMark } from "../components/parts";
import { StageBoxes } from "../components/StageBoxes";
import { PartsLegend, StageTimes } from "../components/StageTimes";
import { bytes, count, duration, layerRange, loss, percent, plural } from "../format";
import { useReading } from "../state/reading";
import { bottleneckSentence, ownPartSentence, pipelineSentence, pipelineTone, singleSentence, stageName } from "../words/pipeline";

const OWN_SHOWN = 6;

interface Props {
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
}

export function Pipeline({ status, nodeNow, reachable, actions }: Props) {
  const pipeline = useReading(actions.readPipeline, reachable, status.state);
  return (
    <Section title="Pipeline">
      {pipeline ? <Content {...{ pipeline, status, nodeNow }} /> : <p class="muted">Asking the node…</p>}
    </Section>
  );
}

function Content({ pipeline, status, nodeNow }: { pipeline: PipelineSummary; status: NodeStatus; nodeNow: number }) {
  const { flow } = pipeline;
  const ownId = status.node_id;
  return (
    <>
      <Summary pipeline={pipeline} ownId={ownId} />
      <StageBoxes pipeline={pipeline} ownId={ownId} />
      {flow && <Numbers flow={flow} />}
      {flow && flow.loads.length > 0 && <Loads flow={flow} ownId={ownId} />}
      {flow && <MicrobatchTraces flow={flow} ownId={ownId} nodeNow={nodeNow} />}
      {!flow && pipeline.own_stages.length > 0 && <NotDriving />}
      {pipeline.own_stages.length > 0 && <OwnStages stages={pipeline.own_stages} />}
    </>
  );
}

function Summary({ pipeline, ownId }: { pipeline: PipelineSummary; ownId: string | null }) {
  const tone = pipelineTone(pipeline);
  const single = singleSentence(pipeline.stages);
  return (
    <section class={`verdict tone-${tone}`} aria-labelledby="pipeline-sentence">
      <div class="swarm-head">
        <ToneMark tone={tone} />
        <h2 id="pipeline-sentence">{pipelineSentence(pipeline)}</h2>
      </div>
      <Facts
        rows={[
          pipeline.stages.length > 0 ? ["This computer", ownPartSentence(pipeline, ownId)] : null,
          single === null ? null : ["At risk", single],
          tone === "bad" ? ["What helps", <Help />] : null,
        ]}
      />
    </section>
  );
}

function Help() {
  return (
    <>
      Another computer in this run takes the missing layers by itself if its memory allows. <a href="#/invite">Invite one</a>
    </>
  );
}

function Numbers({ flow }: { flow: PipelineFlow }) {
  const takeovers = flow.exact_takeovers + flow.approximate_takeovers;
  const covered = flow.microbatches ? `: ${plural(flow.microbatches, "microbatch")} in ${duration(flow.window_seconds)}` : "";
  return (
    <dl class="stats stats-three">
      <Stat label="Tokens per second" value={count(flow.tokens_per_second)} note={`that this computer drives through all stages${covered}`} />
      <Stat label="Idle (Bubble)" value={percent(flow.bubble_share)} note="of the time the computers of the stages did nothing for these microbatches; the less, the better" />
      <Stat
        label="Busiest upload per token"
        value={bytes(flow.busiest_upload_per_token)}
        note={`by the computer that sends most; this one sends and receives ${bytes(flow.wire_bytes_per_token)}. ${starSentence(flow.star_edges.length)}`}
      />
      <Stat label="Recomputed" value={percent(flow.recompute_share)} note="of the work is done twice, by stages that keep less in memory" />
      <Stat
        label="Replacements"
        value={count(takeovers)}
        note={takeovers === 0 ? "no stage was taken over in the middle of a microbatch" : `stages taken over in the middle: ${count(flow.exact_takeovers)} exact, ${count(flow.approximate_takeovers)} approximate`}
      />
      <Stat label="Failed requests" value={count(flow.failures)} note={`after each the node chose another replica; ${plural(flow.given_up, "microbatch")} given up`} />
    </dl>
  );
}

function starSentence(pairs: number) {
  return pairs === 0
    ? "Stages send activations to each other"
    : `${plural(pairs, "pair")} of neighbours cannot reach each other now: this computer passes their activations on`;
}

function Loads({ flow, ownId }: { flow: PipelineFlow; ownId: string | null }) {
  const { bottleneck, loads } = flow;
  const nodes = new Map(loads.map((load) => [load.stage, load.nodes]));
  return (
    <Card title="Where time goes" hint="Average time of a microbatch at each stage, forward and back, over the last minute." wide>
      {bottleneck && <p class="bottleneck">{bottleneckSentence(bottleneck, ownId)}</p>}
      <PartsLegend />
      <StageTimes
        times={loads}
        name="Mean time at each stage"
        note={({ stage }) => (
          <>
            {plural(nodes.get(stage) ?? 0, "computer")}
            {stage === bottleneck?.stage && <span class="pill tone-warn">bottleneck</span>}
          </>
        )}
      />
    </Card>
  );
}

function NotDriving() {
  return (
    <Card title="The way of the microbatches">
      <p>
        This computer works for others: the computers that hold the first layers send microbatches through the stages. Their dashboards show the
        way, the times and the bottleneck.
      </p>
    </Card>
  );
}

function OwnStages({ stages }: { stages: readonly StageStatus[] }) {
  const [shown, pager] = usePages(stages, OWN_SHOWN);
  return (
    <Card title="Stages on this computer" hint="Each collects sequences from any node, and takes a step of its own when it has enough." wide>
      <div class="grid">
        {shown.map((stage) => (
          <section key={stage.stage} class="own-stage" aria-label={stageName(stage.stage)}>
            <h3>
              {stageName(stage.stage)}, {layerRange(stage.layers)}
            </h3>
            <Bar
              label="Sequences for the next step"
              fraction={stage.sequences_accumulated / Math.max(stage.sequences_wanted, 1)}
              text={`${count(stage.sequences_accumulated)} of ${count(stage.sequences_wanted)}`}
            />
            <Facts
              rows={[
                ["Steps", count(stage.steps)],
                stage.loss === null ? null : ["Loss of the last step", loss(stage.loss)],
                ["Half done", plural(stage.open_microbatches, "microbatch")],
                ["Sessions", `${count(stage.sessions)} open`],
                ["Saved", stage.last_saved_step === null ? "not yet" : `at step ${count(stage.last_saved_step)}`],
              ]}
            />
          </section>
        ))}
      </div>
      <Pager {...pager} name="Pages of this computer's stages" />
    </Card>
  );
}
