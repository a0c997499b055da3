// Files of text, as they stand in a message.

const MOST = 2 ** 18; // bytes of a file

/** A file's text as a block of code, to stand behind what a message says already. */
export async function quoted(file, before) {
  if (file.size > MOST) throw new Error(`${file.name} has ${file.size} bytes; a file of text may have ${MOST}.`);
  const text = decoded(await file.arrayBuffer());
  if (text === null) throw new Error(`${file.name} is no text in UTF-8, and no picture or sound.`);
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((marks) => marks.length)); // the fence is longer
  const fence = "`".repeat(longest + 1), language = /\.([A-Za-z0-9+#_-]{1,30})$/.exec(file.name)?.[1] ?? "";
  const space = !before ? "" : before.endsWith("\n") ? "\n" : "\n\n";
  return `${space}${file.name}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}\n`;
}

function decoded(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
