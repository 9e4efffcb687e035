// The stages of the model side by side, and who holds the one that is chosen.

import type { PipelineSummary, RunStage } from "../api/responses";
import { useState } from "preact/hooks";
import { layerRange, shortId } from "../format";
import { copySentence, coverageWords, holdersSentence, holderState, isUnanswered, stageName } from "../words/pipeline";
import { Pager, usePages } from "./Pager";
import { Card } from "./parts";

const HOLDERS_SHOWN = 24;
const MANY_STAGES = 12;

export function StageBoxes({ pipeline, ownId }: { pipeline: PipelineSummary; ownId: string | null }) {
  const { stages } = pipeline;
  const [wanted, setWanted] = useState<number | null>(null);
  const chosen = stages.find((stage) => stage.stage === wanted) ?? mostTelling(pipeline);
  if (!chosen) return null;
  return (
    <Card title="Stages" hint="Text goes in on the left. Each stage passes on what it made of it, and on the way back everyone learns." wide>
      <fieldset class="choices">
        <legend class="hidden-visually">Stages of the model; choose one to see who holds it</legend>
        <div class={`stage-boxes ${stages.length > MANY_STAGES ? "stage-boxes-many" : ""}`}>
          {stages.map((stage) => (
            <StageBox key={stage.stage} {...{ stage, pipeline }} isChosen={stage === chosen} onChoose={() => setWanted(stage.stage)} />
          ))}
        </div>
      </fieldset>
      <Holders key={chosen.stage} stage={chosen} pipeline={pipeline} ownId={ownId} />
    </Card>
  );
}

/** Trouble first, then this computer's own. */
function mostTelling(pipeline: PipelineSummary): RunStage | undefined {
  const { stages } = pipeline;
  const isTrouble = (stage: RunStage) => stage.is_missing || stage.is_resting || isUnanswered(stage, pipeline);
  return stages.find(isTrouble) ?? stages.find((stage) => stage.is_here) ?? stages[0];
}

interface BoxProps {
  stage: RunStage;
  pipeline: PipelineSummary;
  isChosen: boolean;
  onChoose: () => void;
}

function StageBox({ stage, pipeline, isChosen, onChoose }: BoxProps) {
  const [coverage, tone] = coverageWords(stage, pipeline);
  const classes = ["stage-box", stage.is_missing || isUnanswered(stage, pipeline) ? "stage-box-missing" : "", stage.is_here ? "stage-box-here" : ""];
  return (
    <label class={classes.filter(Boolean).join(" ")}>
      <input type="radio" class="hidden-visually" name="stage" checked={isChosen} onChange={onChoose} />
      <strong>{stageName(stage.stage)}</strong> <span class="small">{layerRange(stage.layers)}</span>{" "}
      <span class={`pill ${tone ? `tone-${tone}` : "pill-plain"}`}>{coverage}</span>{" "}
      {stage.is_here && <span class="small stage-box-own">this computer</span>}
    </label>
  );
}

function Holders({ stage, pipeline, ownId }: { stage: RunStage; pipeline: PipelineSummary; ownId: string | null }) {
  const [shown, pager] = usePages(stage.holders, HOLDERS_SHOWN);
  const name = stageName(stage.stage);
  return (
    <section class="stage-holders" aria-label={`Who holds ${name.toLowerCase()}`}>
      <h3>
        {name}, {layerRange(stage.layers)}
      </h3>
      <p>
        {holdersSentence(stage, pipeline)}{" "}
        {pipeline.stages.length > 1 && copySentence(stage)}
      </p>
      <ul class="holders">
        {shown.map((id) => (
          <li key={id}>
            <span class="mono" title={id}>
              {shortId(id)}
            </span>{" "}
            <span class="muted small">
              {holderState(stage, pipeline, id)}
              {id === ownId && ", this computer"}
            </span>
          </li>
        ))}
      </ul>
      <Pager {...pager} name={`Pages of the holders of ${name.toLowerCase()}`} />
    </section>
  );
}
