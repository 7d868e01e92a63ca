# Finds a CUDA compiler before enable_language(CUDA), NVSHMEM, and the headers of NCCL.
#   1. CMAKE_CUDA_COMPILER or $CUDACXX, as given
#   2. the complete toolchain that `pip install "cuda-toolkit[nvcc,cccl]==13.0.*"` puts next to this Python
#   3. nvcc on PATH, in $CUDA_HOME or in /usr/local/cuda
# Sets XEN_MOE_NVCC ("" when there is none) and, for 2, what CMake needs because the wheels have lib/ instead of lib64/ and
# no unversioned libcudart.so. Macros, so that the variables reach the caller.
macro(xen_moe_find_nvcc)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s=u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '', end='')"
    OUTPUT_VARIABLE XEN_MOE_NVIDIA_ROOTS OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(XEN_MOE_NVCC "")
  if(CMAKE_CUDA_COMPILER)
    set(XEN_MOE_NVCC "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(XEN_MOE_NVCC "$ENV{CUDACXX}")
  else()
    foreach(_root IN LISTS XEN_MOE_NVIDIA_ROOTS)
      set(_toolkit "${_root}/cu13")
      if(NOT XEN_MOE_NVCC AND EXISTS "${_toolkit}/bin/nvcc" AND EXISTS "${_toolkit}/nvvm/bin/cicc"
         AND EXISTS "${_toolkit}/include/crt/host_config.h" AND EXISTS "${_toolkit}/lib/libcudadevrt.a")
        set(XEN_MOE_NVCC "${_toolkit}/bin/nvcc")
      endif()
    endforeach()
    if(NOT XEN_MOE_NVCC)
      find_program(XEN_MOE_SYSTEM_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
      if(XEN_MOE_SYSTEM_NVCC)
        set(XEN_MOE_NVCC "${XEN_MOE_SYSTEM_NVCC}")
      endif()
    endif()
  endif()
  if(XEN_MOE_NVCC MATCHES "/nvidia/cu1[0-9]/bin/nvcc$")
    get_filename_component(_toolkit "${XEN_MOE_NVCC}" DIRECTORY)
    get_filename_component(_toolkit "${_toolkit}" DIRECTORY)
    string(APPEND CMAKE_CUDA_FLAGS_INIT " -L${_toolkit}/lib")  # nvcc.profile knows only lib64/
    file(GLOB _cudart "${_toolkit}/lib/libcudart.so*")
    list(GET _cudart 0 _cudart)
    set(CUDA_CUDART "${_cudart}" CACHE FILEPATH "")  # FindCUDAToolkit looks for libcudart.so
    set(CUDA_cudart_LIBRARY "${_cudart}" CACHE FILEPATH "")
  endif()
endmacro()

# Sets XEN_MOE_NVSHMEM_ROOT: $NVSHMEM_HOME, or the nvidia-nvshmem-cu13 package.
macro(xen_moe_find_nvshmem)
  set(XEN_MOE_NVSHMEM_ROOT "")
  foreach(_candidate IN ITEMS "$ENV{NVSHMEM_HOME}" ${XEN_MOE_NVIDIA_ROOTS})
    foreach(_directory IN ITEMS "${_candidate}" "${_candidate}/nvshmem")
      if(NOT XEN_MOE_NVSHMEM_ROOT AND EXISTS "${_directory}/include/nvshmem.h"
         AND EXISTS "${_directory}/lib/libnvshmem_device.a")
        set(XEN_MOE_NVSHMEM_ROOT "${_directory}")
      endif()
    endforeach()
  endforeach()
endmacro()

# Sets XEN_MOE_NCCL_INCLUDE: the headers of $NCCL_HOME or of the nvidia-nccl-cu13 package, with the device interface as of
# 2.32; or "", and XEN_MOE_NO_NCCL says why.
macro(xen_moe_find_nccl_headers)
  set(XEN_MOE_NCCL_INCLUDE "")
  set(XEN_MOE_NO_NCCL "no headers of NCCL were found (pip install 'nvidia-nccl-cu13>=2.32', or set NCCL_HOME)")
  foreach(_candidate IN ITEMS "$ENV{NCCL_HOME}" ${XEN_MOE_NVIDIA_ROOTS})
    foreach(_directory IN ITEMS "${_candidate}/include" "${_candidate}/nccl/include")
      if(NOT XEN_MOE_NCCL_INCLUDE AND EXISTS "${_directory}/nccl.h")
        set(_nccl_version 0.0)
        file(STRINGS "${_directory}/nccl.h" _nccl_lines REGEX "define NCCL_(MAJOR|MINOR) ")
        if("${_nccl_lines}" MATCHES "NCCL_MAJOR ([0-9]+).*NCCL_MINOR ([0-9]+)")
          set(_nccl_version "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
        endif()
        if(_nccl_version VERSION_GREATER_EQUAL 2.32 AND EXISTS "${_directory}/nccl_device.h")
          set(XEN_MOE_NCCL_INCLUDE "${_directory}")
        else()
          set(XEN_MOE_NO_NCCL "the headers in ${_directory} are of NCCL ${_nccl_version}, and 2.32 is needed")
        endif()
      endif()
    endforeach()
  endforeach()
endmacro()
