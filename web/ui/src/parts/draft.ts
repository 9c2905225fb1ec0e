import { useEffect, useRef, useState } from "preact/hooks";

/**
 * What is typed before it is sent. Read it from `latest` where it is sent: a page that is drawn once for the next picture
 * may not yet have drawn the last key when Enter comes.
 */
export function useDraft<T>(given: T): { value: T; latest: { readonly current: T }; set: (value: T) => void } {
  const [value, draw] = useState(given);
  const latest = useRef(given);
  const set = (next: T) => {
    latest.current = next;
    draw(() => next);
  };
  useEffect(() => {
    latest.current = given;
    draw(() => given);
  }, [given]);
  return { value, latest, set };
}
