// Unpacking of what `packing.py` has packed: JSON text and arrays of numbers from binary buffers.

/**
 * Decompress gzip.
 * @param {DataView} buffer
 * @returns {Promise<string>}
 */
export async function unzip(buffer) {
  const bytes = /** @type {DataView<ArrayBuffer>} */ (buffer);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/**
 * Return the content of two buffers: JSON, compressed if long, and the numbers of its arrays.
 * @param {DataView} text
 * @param {DataView} numbers
 * @returns {Promise<Record<string, any>>}
 */
export async function unpack(text, numbers) {
  const bytes = new Uint8Array(text.buffer, text.byteOffset, text.byteLength);
  const isCompressed = bytes[0] === 0x1f;
  const content = JSON.parse(isCompressed ? await unzip(text) : new TextDecoder().decode(bytes));
  // A copy, because a Float64Array must begin at a multiple of eight bytes.
  const copy = numbers.buffer.slice(numbers.byteOffset, numbers.byteOffset + numbers.byteLength);
  return withArrays(content, new Float64Array(copy));
}

/**
 * Return the content of all pairs of buffers, merged.
 * @param {DataView[]} buffers
 */
export async function unpackAll(buffers) {
  const content = {};
  for (let pair = 0; pair < buffers.length; pair += 2) {
    Object.assign(content, await unpack(buffers[pair], buffers[pair + 1]));
  }
  return content;
}

/**
 * Replace every `{ offset, length }` in a value by these numbers, in place.
 * @param {any} value
 * @param {Float64Array} numbers
 * @returns {any}
 */
export function withArrays(value, numbers) {
  if (value === null || typeof value !== "object") return value;
  const { offset, length } = value;
  if (offset !== undefined && length !== undefined) return numbers.subarray(offset, offset + length);
  // Lists of text and numbers hold no arrays.
  if (!Array.isArray(value) || typeof value[0] === "object") {
    for (const key in value) value[key] = withArrays(value[key], numbers);
  }
  return value;
}
