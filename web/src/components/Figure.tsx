// A number with its meaning, which a pointer, a finger or the keyboard brings up.

import { useId } from "preact/hooks";
import type { Figure as FigureValue, Said } from "../words/figures";
import { explanationOf } from "../words/figures";

export function Figure({ of: { path, value, shown } }: { of: FigureValue }) {
  const id = useId();
  return (
    <span class="figure" tabIndex={0} aria-describedby={id} data-path={path} data-value={value ?? ""}>
      {shown}
      <span class="tip" role="tooltip" id={id}>
        {explanationOf(path)}
      </span>
    </span>
  );
}

export function Sentence({ said }: { said: Said }) {
  return <>{said.map((part, at) => (typeof part === "string" ? part : <Figure key={at} of={part} />))}</>;
}
