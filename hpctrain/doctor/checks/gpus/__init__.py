"""The health of the job's GPUs: NVIDIA's by NVML and DCGM, AMD's by amdsmi."""
