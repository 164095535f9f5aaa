"""DICOM files, written by pydicom."""

from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import (
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)


def write(path, pixels, syntax=ExplicitVRLittleEndian, frames=None, bits=None, **elements):
    """Writes (H, W), (H, W, 3) or, with frames, (N, H, W) values; returns the path."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = SecondaryCaptureImageStorage, syntax
    meta.MediaStorageSOPInstanceUID = generate_uid()
    little = syntax != ExplicitVRBigEndian
    made = FileDataset(path, {}, file_meta=meta, preamble=b"\0" * 128, is_little_endian=little)
    made.SOPClassUID, made.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    colour = pixels.ndim == 3 and frames is None
    made.Rows, made.Columns = pixels.shape[:2] if frames is None else pixels.shape[1:3]
    made.SamplesPerPixel, made.PhotometricInterpretation = (3, "RGB") if colour else (1, "MONOCHROME2")
    made.BitsAllocated = 8 * pixels.itemsize
    made.BitsStored = bits or made.BitsAllocated
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(pixels.dtype.kind == "i")
    if colour:
        made.PlanarConfiguration = 0
    if frames is not None:
        made.NumberOfFrames = frames
    made.PixelData = pixels.astype(pixels.dtype.newbyteorder("<" if little else ">")).tobytes()
    for name, value in elements.items():
        setattr(made, name, value)
    if syntax in (RLELossless,):
        made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        made.compress(syntax)
    made.save_as(path, enforce_file_format=True)
    return path
