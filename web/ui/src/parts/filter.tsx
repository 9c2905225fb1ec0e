interface Props {
  label: string;
  value: string;
  placeholder: string;
  testid: string;
  onChange: (value: string) => void;
}

/** The field that the key / leads to. */
export function Filter({ label, value, placeholder, testid, onChange }: Props) {
  return (
    <input
      class="field filter"
      type="search"
      aria-label={label}
      placeholder={placeholder}
      title="Press / to come here"
      value={value}
      data-filter
      data-testid={testid}
      spellcheck={false}
      autocomplete="off"
      onInput={(event) => onChange(event.currentTarget.value)}
    />
  );
}
