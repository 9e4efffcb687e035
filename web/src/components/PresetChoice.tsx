// The three sets of limits as one control. Limits of the owner's own appear as a fourth entry.

import type { PresetsBody } from "../api/responses";
import { useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { OWN_LIMITS, PRESET_LABEL, PRESET_STARTS, presetEffects, PRESETS } from "../words/presets";

interface Props {
  actions: NodeActions;
  disabled: boolean;
  run: (action: () => Promise<string>) => Promise<void>;
}

export function PresetChoice({ actions, disabled, run }: Props) {
  const [body, setBody] = useState<PresetsBody | null>(null);
  const read = () => {
    actions.readPresets().then(setBody, () => setBody(null));
  };
  useEffect(read, [actions]);
  if (body === null) return null;
  const choose = async (name: string) => {
    const preset = body.presets.find((each) => each.name === name);
    if (!preset) return;
    await run(async () => {
      await actions.changeSettings(preset.settings);
      return `${PRESETS[preset.name]}: ${presetEffects(preset)} ${PRESET_STARTS}`;
    });
    read();
  };
  return (
    <select class="button" aria-label={PRESET_LABEL} disabled={disabled} value={body.chosen ?? ""} onChange={(event) => void choose(event.currentTarget.value)}>
      {body.chosen === null && <option value="">{OWN_LIMITS}</option>}
      {body.presets.map((preset) => (
        <option key={preset.name} value={preset.name}>
          {PRESETS[preset.name]}
        </option>
      ))}
    </select>
  );
}
