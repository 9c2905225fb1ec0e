import { useEffect, useState } from "preact/hooks";
import { shortHash } from "../format";
import { explainPath } from "../route";
import { announce } from "./announcer";
import { copy } from "./clipboard";
import { Icon } from "./icon";

/** A hash that leads to its story, with a button that copies all of its digits. */
export function Hash({ hash, link = true }: { hash: string; link?: boolean }) {
  return (
    <span class="hash">
      {link ? (
        <a href={explainPath(hash)} title={`Explain ${hash}`}>
          {shortHash(hash)}
        </a>
      ) : (
        <span title={hash}>{shortHash(hash)}</span>
      )}
      <CopyButton text={hash} what={`hash ${hash}`} />
    </span>
  );
}

export function CopyButton({ text, what, label }: { text: string; what: string; label?: string }) {
  const [done, setDone] = useState(false);
  useEffect(() => {
    if (!done) {
      return;
    }
    const timer = setTimeout(() => setDone(false), 1500);
    return () => clearTimeout(timer);
  }, [done]);
  const click = async (event: Event) => {
    event.stopPropagation();
    const ok = await copy(text);
    setDone(ok);
    announce(ok ? `Copied ${what}` : `Could not copy ${what}`);
  };
  return (
    <button
      type="button"
      class={label ? "button" : "copy"}
      aria-label={`Copy ${what}`}
      title={`Copy ${what}`}
      onClick={click}
    >
      <Icon name={done ? "done" : "copy"} size={label ? 14 : 12} />
      {label}
    </button>
  );
}
