// The three sets of limits as one control. Limits of the owner's own appear as a fourth entry, and so do none.

import type { PresetsBody } from "../api/bodies";
import { useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { actionOf } from "./parts";
import { lineWords, NO_LIMITS, OWN_LIMITS, PRESET_LABEL, PRESET_NOW, PRESET_STARTS, presetEffects, PRESETS, RESTART, RESTART_ABOUT } from "../words/presets";

interface Props {
  startedAt: number; // of the node; after a restart no setting waits for one
  measuredAt: number | null; // when the line was measured; the limits follow it
  actions: NodeActions;
  isOff: boolean;
  run: (action: () => Promise<string>) => Promise<void>;
}

export function PresetChoice({ startedAt, measuredAt, actions, isOff, run }: Props) {
  const [body, setBody] = useState<PresetsBody | null>(null);
  const read = () => {
    actions.readPresets().then(setBody, () => setBody(null));
  };
  useEffect(read, [actions, startedAt, measuredAt]);
  if (body === null) return null;
  const choose = async (name: string) => {
    const preset = body.presets.find((each) => each.name === name);
    if (isOff || !preset) return setBody({ ...body }); // shows the preset in use again
    await run(async () => {
      await actions.changeSettings(preset.settings);
      const after = await actions.readPresets();
      setBody(after);
      return `${PRESETS[preset.name]}: ${presetEffects(preset)} ${after.after_restart.length > 0 ? PRESET_STARTS : PRESET_NOW}`;
    });
  };
  const inUse = body.presets.find((each) => each.name === body.chosen);
  const about = `${inUse ? `${presetEffects(inUse)} ` : ""}${lineWords(body.line)}`;
  return (
    <>
      <select class="button" title={about} aria-label={PRESET_LABEL} aria-disabled={isOff} value={body.chosen ?? ""} onChange={(event) => void choose(event.currentTarget.value)}>
        {body.chosen === null && <option value="">{body.has_limits ? OWN_LIMITS : NO_LIMITS}</option>}
        {body.presets.map((preset) => (
          <option key={preset.name} value={preset.name}>
            {PRESETS[preset.name]}
          </option>
        ))}
      </select>
      {body.after_restart.length > 0 && (
        <button type="button" class="button" title={RESTART_ABOUT} {...actionOf(isOff, () => void run(actions.restart))}>
          {RESTART}
        </button>
      )}
    </>
  );
}
